"""Runs the steps of a module as a pipeline: microbatches, what they log, and the loss that all ranks return."""

from collections.abc import Callable, Iterator, Sized
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves
from torch.utils.data import BatchSampler
from torchmetrics import Metric

from lightning_ups.transforms.patching import instead_of
from lightning_ups.transforms.pipeline import Cut, Stage, Stages, build_schedule, showing_others, split_batch
from lightning_ups.transforms.random_state import host_state, restore_host_state

Call = Callable[..., Any]  # a step of the module, in its context
_LOSS = ""  # as if the module logged it
_REDUCE = {"max": torch.amax, "min": torch.amin, "sum": torch.sum}
_HOOKS = {
    "backward": "torch's schedule runs it. Scale the loss in training_step",
    "configure_gradient_clipping": "each rank has only its stages. Use Trainer(gradient_clip_val=1.0)",
}


def refuse_pipeline(module: LightningModule) -> None:
    """Raise if a feature of ``module`` or of its Trainer cannot work in a pipeline."""
    trainer = module.trainer
    of = "FSDP2Strategy(pipeline_parallel_size) does not support"
    if not module.automatic_optimization:
        raise ValueError(
            f"{of} automatic_optimization=False: a step is run stage by stage. Return the loss from training_step, or"
            " leave pipeline_parallel_size out."
        )
    if trainer.state.fn == TrainerFn.PREDICTING:
        raise ValueError(f"{of} Trainer.predict. Load a checkpoint with Trainer(devices=1, strategy='fsdp2').")
    for hook, why in _HOOKS.items():
        if trainer.state.fn == TrainerFn.FITTING and is_overridden(hook, module):
            raise ValueError(f"{of} {type(module).__name__}.{hook}: {why}, and remove {hook}.")


def refuse_frozen(module: LightningModule, cut: Cut) -> None:
    """Raise if a rank has nothing to train."""
    trained = set()
    for name, home in cut.homes.items():
        place, _, key = name.rpartition(".")
        if getattr(module.get_submodule(place), key).requires_grad:
            trained.add(home)
    if module.trainer.state.fn == TrainerFn.FITTING and len(trained) < cut.size:
        rank = min({*range(cut.size)} - trained)
        raise ValueError(
            f"All parameters of {type(module).__name__} on rank {rank} of the pipeline are frozen. Leave"
            " pipeline_parallel_size out: FSDP2Strategy() trains it."
        )


def _refuse_last_batch(trainer: Trainer, microbatches: int) -> None:
    """Raise if the last batch of an epoch cannot be divided, as far as the loaders tell."""
    steps = trainer.max_steps * trainer.accumulate_grad_batches
    for loader in tree_leaves(trainer.train_dataloader):
        batches = getattr(loader, "batch_sampler", None)
        if type(batches) is not BatchSampler or batches.drop_last or not isinstance(batches.sampler, Sized):
            continue
        rows = len(batches.sampler) % batches.batch_size
        if rows % microbatches and not trainer.num_training_batches < len(batches) and not 0 <= steps < len(batches):
            raise ValueError(
                f"The last batch of an epoch has {rows} rows, which microbatches={microbatches} does not divide. Use"
                " DataLoader(..., drop_last=True)."
            )


class Pipeline:
    """Runs the steps of ``module``, of which each rank has some stages.

    Args:
        module: The module, cut.
        cut: How it is cut.
        group: The ranks of the pipeline.
        microbatches: The number of microbatches of a training step.
        divides: Whether blocks can compute gradients of inputs first, and those of weights later.
        device: The device of this rank.
        undo: Ends it.
    """

    def __init__(
        self,
        module: LightningModule,
        cut: Cut,
        *,
        group: ProcessGroup,
        microbatches: int,
        divides: bool,
        device: torch.device,
        undo: ExitStack,
    ) -> None:
        self._module, self._cut, self._group, self._device = module, cut, group, device
        self._microbatches, self._divides, self._last = microbatches, divides, cut.ranks[-1]
        self._stages = Stages(module, cut, undo=undo)
        self._schedules: dict[Any, Callable[[], None]] = {}  # by the shapes of a microbatch
        self._call: Call = lambda *_: None
        self._batches: list[Any] = []
        self._loss_scale, self._seed, self._is_first_step = 1.0, 0, True
        self._results: list[Any] = []  # of microbatches, on the last stage's rank
        self._logged: list[dict[str, tuple[Any, ...]]] = []  # (value, args, kwargs) by name, of microbatches

    def train(self, call: Call, batch: Any, *args: Any, scale: float, **kwargs: Any) -> Any:
        """Run forward and backward of all microbatches, and return their mean loss.

        Args:
            call: Calls ``training_step``.
            batch: The batch.
            args: Further arguments of the step.
            scale: The factor of the loss in the backward.
            kwargs: Further arguments of the step.
        """
        if self._is_first_step:
            _refuse_last_batch(self._module.trainer, self._microbatches)
        self._loss_scale = scale / self._microbatches
        batches = split_batch(batch, self._microbatches)
        with self._running(call, batches, *args, **kwargs):
            key = tuple((leaf.shape, leaf.dtype) for leaf in tree_leaves(batches[0]) if isinstance(leaf, Tensor))
            if key not in self._schedules:
                self._schedules[key] = self._build()
            self._schedules[key]()
        loss = self._share()
        assert loss is not None
        if self._is_first_step and loss.isnan():
            raise ValueError(
                "The first loss is NaN. In a pipeline it cannot depend on what other stages compute: parameters of"
                " other ranks, and outputs or attributes of earlier blocks. Use schedule='zero-bubble' if it reads"
                " parameters before the blocks, else leave pipeline_parallel_size out."
            )
        self._is_first_step = False
        return loss.requires_grad_()

    def evaluate(self, call: Call, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a step without a backward on the whole batch; return its result, on the last stage's rank alone."""
        with self._running(call, [batch], *args, **kwargs):
            self._one_by_one(lambda stage, received: self._forward(stage, 0, received))
        self._share()
        return self._results[0] if self._results else None

    @contextmanager
    def _running(self, call: Call, batches: list[Any], *args: Any, **kwargs: Any) -> Iterator[None]:
        self._call = lambda batch: call(batch, *args, **kwargs)
        self._batches, self._results, self._logged = batches, [], []
        seed = torch.randint(2**62, ()).to(self._device)
        dist.broadcast(seed, group=self._group, group_src=0)  # hooks may have drawn on one rank alone
        self._seed, state = int(seed), host_state()
        try:
            devices = [self._device] if self._device.type == "cuda" else []
            with torch.random.fork_rng(devices=devices), showing_others(self._module):
                yield
        finally:
            restore_host_state(state)

    def _build(self) -> Callable[[], None]:
        return build_schedule(
            self._cut,
            [Stage(partial(self._forward, stage), self._module.parameters) for stage in self._cut.own_stages],
            hidden=self._rehearse(),
            microbatches=self._microbatches,
            loss_scale=lambda: self._loss_scale,
            divides=self._divides,
            device=self._device,
            group=self._group,
        )

    def _forward(self, stage: int, number: int, received: Tensor | None) -> Tensor:
        logged: dict[str, tuple[Any, ...]] = {}
        with self._logging_to(logged):
            step = partial(self._call, self._batches[number])
            result = self._stages.run(stage, step, received=received, seed=self._seed + number)
        if stage + 1 < len(self._cut.stages):
            return result
        self._results.append(result)
        if not torch.is_grad_enabled():
            self._logged.append(logged)
            return torch.zeros((), device=self._device)
        loss = result.get("loss") if isinstance(result, dict) else result
        if not isinstance(loss, Tensor) or loss.dim():
            raise ValueError(
                f"training_step returned {type(result).__name__}, and pipeline parallelism needs a scalar loss of each"
                " microbatch. Return the loss, or a dict with 'loss'."
            )
        self._logged.append({_LOSS: (loss.detach(), (), {}), **logged})
        return loss.double()  # stages agree on a dtype before the first microbatch

    @contextmanager
    def _logging_to(self, logged: dict[str, tuple[Any, ...]]) -> Iterator[None]:
        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            logged[name] = value.detach() if isinstance(value, Tensor) else value, args, kwargs

        with instead_of(self._module, "log", log):
            yield

    def _share(self) -> Tensor | None:
        """Log on each rank what the last stage logged, reduced over microbatches, and return the mean loss."""
        heads: list[Any] = []
        reduced: list[Tensor] = []
        for name in dict.fromkeys(name for logged in self._logged for name in logged):
            entries = [logged[name] for logged in self._logged if name in logged]
            value, args, kwargs = entries[-1]
            if isinstance(value, Metric):  # its state is that of all microbatches
                metric = next(place for place, each in self._module.named_modules() if each is value)
                heads.append((name, args, kwargs, metric, None))
                continue
            numbers = [torch.as_tensor(each, device=self._device) for each, *_ in entries]
            reduce = kwargs.get("reduce_fx", args[4] if len(args) > 4 else "mean")
            over = _REDUCE.get(getattr(reduce, "__name__", reduce), torch.mean)  # Lightning refuses others
            reduced.append(over(torch.stack([number.double() for number in numbers])))
            heads.append((name, args, kwargs, None, numbers[0].dtype))
        box = [heads]
        dist.broadcast_object_list(box, group=self._group, group_src=self._last)
        count = sum(metric is None for *_, metric, _ in box[0])
        values = torch.stack(reduced) if reduced else torch.empty(count, dtype=torch.float64, device=self._device)
        dist.broadcast(values, group=self._group, group_src=self._last)
        left, loss = iter(values), None
        for name, args, kwargs, metric, dtype in box[0]:
            if metric is not None:
                value: Any = self._module.get_submodule(metric)
            else:
                value = next(left).to(dtype if dtype.is_floating_point else torch.float32)
            if name == _LOSS:
                loss = value
            else:
                self._module.log(name, value, *args, **kwargs)
        return loss

    def _rehearse(self) -> Tensor:
        """Run the blocks on a microbatch without gradients; return a meta tensor like what stages pass on.

        Raises:
            ValueError: If the model cannot run as a pipeline.
        """
        modes = [(module, module.training) for module in self._module.modules()]
        self._module.eval()  # no dropout, and no statistics
        step = partial(self._call, self._batches[0])
        try:
            with self._logging_to({}):
                return self._one_by_one(lambda stage, x: self._stages.rehearse(stage, step, received=x)).to("meta")
        finally:
            for module, training in modes:
                module.training = training

    def _one_by_one(self, run: Callable[[int, Tensor | None], Tensor]) -> Tensor:
        """Run one stage after the other, with the output of the last one, and return the last output on all ranks.

        If one rank raises, all do.
        """
        hidden: Tensor | None = None
        for stage, rank in enumerate(self._cut.ranks):
            out: Tensor | None = None
            box: list[Any] = [None] * 4
            cause: Exception | None = None
            if rank == self._cut.rank:
                try:
                    out = run(stage, hidden).contiguous()
                    box = [out.shape, out.dtype, self._stages.structure, None]
                except Exception as error:  # noqa: BLE001  (raised below, on every rank, or the others would wait)
                    cause, box[3] = error, f"{type(error).__name__}: {error}"
            dist.broadcast_object_list(box, group=self._group, group_src=rank)
            shape, dtype, structure, failure = box
            if failure is not None:
                raise RuntimeError(f"Stage {stage} of the pipeline has failed: {failure}") if cause is None else cause
            self._stages.structure = structure
            hidden = torch.empty(shape, dtype=dtype, device=self._device) if out is None else out.detach()
            dist.broadcast(hidden, group=self._group, group_src=rank)
        assert hidden is not None
        return hidden
