"""Lightning's DDP with less copying, buckets of a measured size, compression and sharded optimizer state."""

import inspect
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_ups._compat.lightning.steps import bind_scheduler
from lightning_ups.optim.delegating import go_by_the_name_of
from lightning_ups.optim.partitioned import PartitionedOptimizer
from lightning_ups.order import PolicyPrecision, Step
from lightning_ups.order.arguments import check_choice, check_finite, check_least
from lightning_ups.strategies.bucket_size import measure_bucket_size
from lightning_ups.strategies.processes import Communication

Compression = Literal["bf16", "powersgd"]
_RANK, _START = 4, 1000  # of PowerSGD


class TunedDDPStrategy(DDPStrategy):
    """Train as ``strategy="ddp"`` does, with less copying between gradients and buckets.

    Gradients are views of DDP's buckets, and the size of the buckets is chosen by a measurement of a second or less
    before training. Without ``compression``, losses and weights are those of stock DDP.

    Args:
        bucket_mb: Size of the buckets in MiB. None: measured.
        find_unused_parameters: Allow parameters without a gradient, which may differ from step to step.
        static_graph: Every step uses the same parameters. Unused ones are then found once and not in every step, and
            reentrant checkpointing works. A run whose steps differ fails or trains wrongly.
        compression: ``"bf16"`` reduces gradients in bfloat16, half of the traffic. ``"powersgd"`` reduces low-rank
            factors of them, for slow networks. Both change the gradients.
        powersgd_rank: Rank of the factors.
        powersgd_start: Optimizer steps before PowerSGD begins; at least 2.
        shard_optimizer_state: Let each rank keep and step a part of the optimizer's state (ZeRO stage 1). Checkpoints
            are the same as without.
        communication: Timeout and options of NCCL.

    Raises:
        ValueError: If an argument is out of range, or when fitting starts, if it contradicts the precision or a
            callback.

    Example::

        Trainer(strategy=TunedDDPStrategy(shard_optimizer_state=True), devices=2)
    """

    def __init__(
        self,
        *,
        bucket_mb: float | None = None,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        compression: Compression | None = None,
        powersgd_rank: int = _RANK,
        powersgd_start: int = _START,
        shard_optimizer_state: bool = False,
        communication: Communication | None = None,
    ) -> None:
        of = type(self).__name__
        check_finite("bucket_mb", bucket_mb, of=of, why="It is a size in MiB.", above=0, optional=True)
        if compression is not None:
            check_choice("compression", compression, get_args(Compression), of=of, why="It is how gradients travel.")
        check_least("powersgd_rank", powersgd_rank, 1, of=of, why="It is the rank of a matrix.")
        check_least("powersgd_start", powersgd_start, 2, of=of, why="DDP rebuilds its buckets before.")
        if compression != "powersgd" and (powersgd_rank, powersgd_start) != (_RANK, _START):
            raise ValueError(
                f"{of} reads powersgd_rank and powersgd_start with compression='powersgd' alone. Set it, or leave them"
                " out."
            )
        self._communication = communication or Communication()
        options: dict[str, Any] = {"batched_grad_copy": True} if _BATCHES_COPIES else {}
        super().__init__(
            timeout=self._communication.timeout,
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            gradient_as_bucket_view=True,
            **options,
        )
        self._bucket_mb, self._compression = bucket_mb, compression
        self._powersgd_rank, self._powersgd_start = powersgd_rank, powersgd_start
        self._shards_state = shard_optimizer_state
        self._knows_graph = False  # whether this fit has had a backward

    @override
    def setup_distributed(self) -> None:
        self._communication.prepare(self.root_device)
        super().setup_distributed()

    @override
    def setup(self, trainer: Trainer) -> None:
        self._check(trainer)
        super().setup(trainer)

    def _check(self, trainer: Trainer) -> None:
        precision = self.precision_plugin
        if isinstance(precision, PolicyPrecision) and precision.capabilities.holds_masters:
            name = "shard_optimizer_state" if self._shards_state else "compression"
            if self._shards_state or self._compression:
                raise ValueError(
                    f"{type(self).__name__}({name}=...) and {type(precision).__name__}(weights='masters') exclude each"
                    f" other: masters reduce and step gradients themselves. Leave out {name}, or use"
                    " weights='autocast'."
                )
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        owner = next((c for c in callbacks if isinstance(c, Step) and c.owns_optimizer_state), None)
        if self._shards_state and owner is not None:
            raise ValueError(
                f"{type(self).__name__}(shard_optimizer_state=True) and {type(owner).__name__} exclude each other: both"
                " decide where the optimizer's state is. Leave one of them out."
            )

    @override
    def configure_ddp(self) -> None:
        self._pl_static_graph_delay_done = self._knows_graph = False
        self._ddp_kwargs["bucket_cap_mb"] = self._bucket_size()
        super().configure_ddp()
        self._register_hook()

    @override
    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        # On the stream of training. Lightning 2.6.6 uses another one, for which each gradient would wait in backward.
        return DistributedDataParallel(model, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs)

    def _bucket_size(self) -> float | None:
        assert self.model is not None
        if self._bucket_mb is not None or self.world_size == 1:
            return self._bucket_mb
        trained = [p for p in self.model.parameters() if p.requires_grad]
        found = measure_bucket_size(sum(p.numel() * p.element_size() for p in trained), self.root_device)
        rank_zero_info(f"{type(self).__name__}: {found}.")
        return found.mb

    def _register_hook(self) -> None:
        wrapper, precision = self.model, self.precision_plugin
        assert isinstance(wrapper, DistributedDataParallel)
        if self._compression == "bf16":
            wrapper.register_comm_hook(torch.bfloat16, _reduce_in)
        elif self._compression == "powersgd":
            state = PowerSGDState(
                None, matrix_approximation_rank=self._powersgd_rank, start_powerSGD_iter=self._powersgd_start
            )
            wrapper.register_comm_hook(state, powerSGD_hook)
        elif (
            isinstance(precision, PolicyPrecision)
            and precision.policy.reduce is torch.float32
            and not precision.capabilities.holds_masters  # which register a hook of their own
            and any(p.requires_grad and p.dtype is precision.policy.param for p in wrapper.parameters())
        ):
            wrapper.register_comm_hook(torch.float32, _reduce_in)

    @override
    @contextmanager
    def block_backward_sync(self) -> Generator[None]:
        # A static graph is found in the first backward, which must reduce. Averages are then reduced once more.
        if self._ddp_kwargs["static_graph"] and not self._knows_graph:
            yield
        else:
            with super().block_backward_sync():
                yield

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        self._knows_graph = True

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        if not self._shards_state:
            return
        ours = {optimizer: PartitionedOptimizer(optimizer) for optimizer in self.optimizers}
        for optimizer, partitioned in ours.items():
            go_by_the_name_of(optimizer, partitioned)
        self.optimizers = [*ours.values()]
        for config in self.lr_scheduler_configs:
            bind_scheduler(config.scheduler, {**ours})


_BATCHES_COPIES = "batched_grad_copy" in inspect.signature(DistributedDataParallel).parameters  # from torch 2.13


def _reduce_in(dtype: torch.dtype, bucket: dist.GradBucket) -> Future[Tensor]:
    buffer = bucket.buffer()
    work = dist.all_reduce(buffer.to(dtype).div_(dist.get_world_size()), async_op=True)
    assert work is not None
    # The value of the future: its memory is known to the stream on which this copies.
    return work.get_future().then(lambda reduced: buffer.copy_(reduced.value()[0]))
