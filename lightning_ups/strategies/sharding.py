"""The common base of sharding strategies: environment, order of changes, buffers, clipping, checkpoints."""

import signal
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal, get_args

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ups._compat.lightning.sharding import (
    averaged_copies,
    destroy_at_exit,
    finetuning_by_identity,
    has_weak_references,
    is_interactive,
    keeping_attributes,
    move_all_but_parameters,
    taken_whole,
    without_inference_mode,
)
from lightning_ups._compat.lightning.sigterm import SigtermPoll
from lightning_ups._compat.torch.fsdp.recording import Recording, recording
from lightning_ups._compat.torch.fsdp.shard_data import IndexReads, shard_data_written
from lightning_ups.order import (
    AppliesDeclarations,
    PolicyPrecision,
    Run,
    Step,
    apply_declared,
    check,
    finish_optimizers,
    under_sharding,
    undo,
)
from lightning_ups.order.arguments import check_choice, check_least, check_some
from lightning_ups.strategies.checkpoints import Checkpoints, OnUnreplayable, Save
from lightning_ups.strategies.processes import Communication, check_processes, refuse_notebook, rendezvous
from lightning_ups.strategies.steps import Convert, Materialise
from lightning_ups.transforms.blocks import as_patterns
from lightning_ups.transforms.error_hints import keeping_interrupt, note_shards
from lightning_ups.transforms.sharding import (
    DATA,
    PIPELINE,
    TENSOR,
    BufferSync,
    MeshSizes,
    StepState,
    average_gradients,
    build_mesh,
    check_one_batch,
    data_mesh,
    explaining_shards,
    give_first,
    is_on_meta,
    num_shares,
    one_kind_at_a_time,
    plan_initialisation,
    recall,
    shard_alike,
    share_random_state,
)

Sharding = Literal["full", "gradients", "none"]
Device = Literal["cpu", "device"]

BATCHES_TO_COMPARE = 3  # of each kind of step, if ranks compute one batch together; each comparison synchronizes


class ShardingStrategy(ModelParallelStrategy, AppliesDeclarations):
    """Applies all changes in order, with sharding among them. Subclasses shard in a step of their own."""

    shards = True
    _remedy = (
        "Let all ranks run the same modules and branches, with a loss times 0 where it must not count, or use"
        " strategy='ddp_find_unused_parameters_true'."
    )

    def __init__(
        self,
        *,
        sharding: Sharding,
        replicate_size: int,
        blocks: Sequence[str] | None,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        offload: bool = False,
        unused_parameters: bool = False,
        meta_device: bool,
        initialise_on: Device,
        sigterm_every: int,
        communication: Communication,
        save: Save,
        async_save: bool,
        weights_only: bool,
        on_unreplayable: OnUnreplayable,
    ) -> None:
        of = type(self).__name__
        check_choice("sharding", sharding, get_args(Sharding), of=of, why="It says what is sharded.")
        check_choice("initialise_on", initialise_on, get_args(Device), of=of, why="It draws initial values.")
        check_choice("save", save, get_args(Save), of=of, why="It is a format.")
        check_choice("on_unreplayable", on_unreplayable, get_args(OnUnreplayable), of=of, why="It is a reaction.")
        check_least("replicate_size", replicate_size, 1, of=of, why="It counts copies of the sharded model.")
        check_least("sigterm_every", sigterm_every, 1, of=of, why="It counts steps.")
        if sharding == "none" and replicate_size != 1:
            raise ValueError(
                f"{of}(sharding='none', replicate_size={replicate_size}) contradicts itself: without sharding every"
                " device has a copy. Leave replicate_size out, or choose another sharding."
            )
        super().__init__(timeout=communication.timeout)
        self.sharding: Sharding = sharding
        self.replicate_size = replicate_size
        self.blocks = None if blocks is None else as_patterns(blocks)
        check_some("blocks", self.blocks, of=of, why="It would shard no block by itself.")
        self.tensor_parallel_size, self.pipeline_parallel_size = tensor_parallel_size, pipeline_parallel_size
        self._offload, self._unused = offload, unused_parameters
        self._meta_device, self._initialise_on = meta_device, initialise_on
        self._sigterm_every, self._communication = sigterm_every, communication
        self._in_effect = ExitStack()  # changes of the Trainer's loops
        self._index_reads = IndexReads()
        self._recording: Recording | None = None
        self._buffers: BufferSync | None = None
        self._compared: Counter[str] = Counter()  # batches, by kind of step
        self._step: StepState | None = None  # the state of the current optimizer step
        self._steps_made = 0  # by optimizers, in this fit
        self._saw_backward = False
        self.checkpoints = Checkpoints(
            self, save=save, async_save=async_save, weights_only=weights_only, on_unreplayable=on_unreplayable
        )

    @property
    def state_key(self) -> str:
        """Raise a hint: a Trainer reads this attribute of callbacks, and never of a strategy."""
        name = type(self).__name__
        raise AttributeError(
            f"{name} is given as a callback, but it is a strategy. Write Trainer(strategy={name}(...))."
        )

    @property
    @override
    def settings(self) -> dict[str, Any]:
        """How the module is divided, with the names of the arguments; memory use depends on it."""
        return {
            "sharding": self.sharding,
            "replicate_size": self.replicate_size,
            "offload": self._offload,
            "tensor_parallel_size": self.tensor_parallel_size,
            "blocks": self.blocks,
        }

    # Methods of subclasses

    @abstractmethod
    def _own_steps(self, module: LightningModule, precision: PolicyPrecision) -> list[Step]:
        """Return the steps that shard."""

    def _after_sharding(self) -> None:
        """Called before copies are sharded and optimizers are created."""

    def _within_step(self, step: StepState) -> AbstractContextManager[None]:
        """Return a context in which a step reads whole parameters."""
        return nullcontext()

    def _within_backward(self) -> AbstractContextManager[None]:
        """Return a context around the backward itself, without the hooks before and after it."""
        return nullcontext()

    def _after_evaluation(self) -> None:
        """Do what a backward would have done."""

    def _note_reduced(self, names: Sequence[str]) -> None:
        """Called before this rank reduces these gradients with the other ranks."""

    def _after_averaging(self) -> None:
        """Called after the last backward of an optimizer step."""

    @abstractmethod
    def _mark(self) -> int:
        """Return a checksum of what training steps have run, which must be the same on all ranks."""

    # Setup

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if self._launcher is not None and is_interactive():
            refuse_notebook(type(self).__name__, self.num_nodes * self.num_processes)
            self._launcher = None  # nothing to start; Lightning refuses this launcher in notebooks

    @override
    def setup_environment(self) -> None:
        assert self.accelerator is not None
        assert self.cluster_environment is not None
        assert self.lightning_module is not None
        check_processes(self.cluster_environment, devices=self.num_processes, num_nodes=self.num_nodes)
        sizes = MeshSizes.of(
            self.num_nodes * self.num_processes,
            replicate=None if self.sharding == "none" else self.replicate_size,
            tensor=self.tensor_parallel_size,
            pipeline=self.pipeline_parallel_size,
        )
        self.accelerator.setup_device(self.root_device)
        self._communication.prepare(self.root_device)
        if self.root_device.type == "cuda":
            destroy_at_exit()
        with rendezvous(self.cluster_environment, timeout=self._communication.timeout, launcher=self.launcher):
            self._setup_distributed()
        self._device_mesh = build_mesh(self.root_device.type, sizes)
        self.lightning_module._device_mesh = self._device_mesh  # a `configure_model` may read it
        self._change_loops(self.lightning_module.trainer)

    def _refuse_unlike(self) -> None:
        raise RuntimeError(
            "In training_step, ranks have gathered different parameters, or reduced different gradients, or in a"
            " different order. Collectives are matched by call order, so all results since then are wrong."
            f" {self._remedy}"
        )

    def _change_loops(self, trainer: Trainer) -> None:
        self._in_effect.close()
        self._poll = SigtermPoll(trainer, every=self._sigterm_every, mark=self._mark, differ=self._refuse_unlike)
        self._in_effect.enter_context(self._poll.installed())
        self._in_effect.enter_context(without_inference_mode(trainer))
        self._in_effect.enter_context(finetuning_by_identity())
        self._index_reads = self._in_effect.enter_context(shard_data_written())
        self._in_effect.enter_context(taken_whole())

    @override
    def _get_process_group_backend(self) -> str:
        if self.root_device.type == "cuda":
            # Both: clipping of offloaded gradients, polls and objects use gloo, and do not wait for the GPU.
            return "cpu:gloo,cuda:nccl"
        return super()._get_process_group_backend()

    @override
    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        with (
            super().tensor_init_context(self._meta_device if empty_init is None else empty_init),
            recording() as record,
        ):
            yield
        self._recording = record if record.operations else self._recording

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        check(Run.of(trainer))
        if trainer.state.fn == TrainerFn.FITTING:
            self.checkpoints.check_places()
        self._compared.clear()
        precision = self.precision_plugin = under_sharding(
            self.precision_plugin, mesh=self.device_mesh, in_graph=self.whole_graph
        )
        apply_declared(trainer, *self._steps(precision), mesh=self.device_mesh)
        self.model_to_device()
        self._recording = None
        self._after_sharding()
        for copy in averaged_copies(trainer.callbacks):  # type: ignore[attr-defined]
            shard_alike(copy, trainer.lightning_module)
        if trainer.state.fn == TrainerFn.FITTING:
            self._prepare_training(precision)
            self.checkpoints.follow(trainer)  # before `configure_optimizers`, which may make the loaders
            self.setup_optimizers(trainer)
            finish_optimizers(trainer)
            for optimizer in self.optimizers:
                self._in_effect.enter_context(one_kind_at_a_time(optimizer))
        self.setup_precision_plugin()

    def _steps(self, precision: PolicyPrecision) -> list[Step]:
        assert self.lightning_module is not None
        steps: list[Step] = [Convert(self._layer_sync), *self._own_steps(self.lightning_module, precision)]
        if is_on_meta(self.lightning_module):
            plan = plan_initialisation(self.lightning_module, self._recording)
            steps.append(Materialise(plan, self._offload, self._initialise_on))
        return steps

    def _prepare_training(self, precision: PolicyPrecision) -> None:
        assert self.lightning_module is not None
        self._buffers = BufferSync(self.lightning_module, group=self._replicas)
        if self.tensor_parallel_size > 1:
            share_random_state(self.device_mesh[TENSOR].get_group())
        if self.pipeline_parallel_size > 1:
            share_random_state(self.device_mesh[PIPELINE].get_group())
        self._step, self._steps_made, self._saw_backward = None, 0, False

    @override
    def model_to_device(self) -> None:
        # Sharding moved parameters and buffers; metrics and the module's `device` remain.
        assert self.lightning_module is not None
        if self._offload or has_weak_references(self.lightning_module):
            move_all_but_parameters(self.lightning_module, self.root_device)
        else:
            with keeping_attributes(self.lightning_module):
                self.lightning_module.to(self.root_device)

    @property
    def _gathers(self) -> bool:
        """Whether ranks hold only parts of parameters, which all ranks need in each step."""
        return num_shares(data_mesh(self.device_mesh)) > 1

    @property
    def _replicas(self) -> Any:
        return self.device_mesh[DATA].get_group()

    # Steps

    def _open_step(self) -> StepState:
        """Return the state of the current optimizer step, which begins now if there is none."""
        if self._step is None:
            self._step = StepState(self._steps_made)
        return self._step

    def _close_step(self) -> None:
        """End the current optimizer step; the rest of a manual step belongs to the next."""
        self._steps_made += 1
        self._step = StepState(self._steps_made, is_manual=True) if self._in_manual_step else None

    @property
    def _in_manual_step(self) -> bool:
        return self._step is not None and self._step.is_manual

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        assert self.lightning_module is not None
        assert self._buffers is not None
        self._index_reads.check()
        self._compare_batch("training_step", args)
        step = self._open_step()
        if not step.has_accumulated:
            self._buffers()  # before the forward, and not within an accumulation, as DDP does
        step.is_manual = not self.lightning_module.automatic_optimization
        with keeping_interrupt(), self._within_step(step):
            output = self._call("training_step", *args, **kwargs)
        self._open_step().is_manual = False
        self._buffers.note_step()
        return output

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        with self._evaluation("validation_step", args):
            return self._call("validation_step", *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        with self._evaluation("test_step", args):
            return self._call("test_step", *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluation("predict_step", args):
            return self._call("predict_step", *args, **kwargs)

    def _call(self, step: str, *args: Any, **kwargs: Any) -> Any:
        """Call the method ``step`` of the module, in the context of the precision."""
        return getattr(ModelParallelStrategy, step)(self, *args, **kwargs)

    @override
    def on_validation_start(self) -> None:
        self._give_buffers()

    def _give_buffers(self) -> None:
        """Broadcast rank 0's buffers, including those of averages, which may be evaluated and saved instead."""
        if self._buffers is None:
            return
        self._buffers()
        assert self.lightning_module is not None
        for copy in averaged_copies(self.lightning_module.trainer.callbacks):  # type: ignore[attr-defined]
            buffers = [*copy.buffers()]
            here = [buffer.to(self.root_device) for buffer in buffers]  # an average may be on the CPU
            give_first(here, group=self._replicas)
            for buffer, given in zip(buffers, here, strict=True):
                if given is not buffer:
                    buffer.copy_(given)

    @contextmanager
    def _evaluation(self, step: str, args: tuple[Any, ...]) -> Iterator[None]:
        if self._gathers:  # otherwise ranks may evaluate different numbers of batches
            self._poll.poll()
        self._index_reads.check()
        self._compare_batch(step, args)
        with self._within_step(StepState(self._steps_made, step)):
            yield
        self._after_evaluation()

    def _compare_batch(self, step: str, args: tuple[Any, ...]) -> None:
        if self.tensor_parallel_size > 1 and self._compared[step] < BATCHES_TO_COMPARE:
            self._compared[step] += 1
            check_one_batch(args, group=self.device_mesh[TENSOR].get_group())
        if self.pipeline_parallel_size > 1 and self._compared[PIPELINE + step] < BATCHES_TO_COMPARE:
            self._compared[PIPELINE + step] += 1
            check_one_batch(args, group=self.device_mesh[PIPELINE].get_group(), size="pipeline_parallel_size")

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        # As Lightning's own, except that `on_after_backward` sees averaged gradients, as under DDP.
        module, precision = self.lightning_module, self.precision_plugin
        assert module is not None
        self.pre_backward(closure_loss)
        closure_loss = precision.pre_backward(closure_loss, module)
        with keeping_interrupt(), self._within_backward():
            precision.backward(closure_loss, module, optimizer, *args, **kwargs)
        step = self._open_step()
        self._saw_backward, step.has_accumulated = True, step.accumulates
        if not step.accumulates:
            if not self._unused:
                self._note_reduced([name for name, p in self._replicated.items() if p.grad is not None])
            average_gradients(self._replicated.values(), group=self._replicas, unused=self._unused)
            self._after_averaging()
        closure_loss = precision.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    @property
    def _replicated(self) -> Mapping[str, nn.Parameter]:
        assert self.lightning_module is not None
        return recall(self.lightning_module).replicated

    def _refuse_backward_unseen(self) -> None:
        """Raise if gradients would be those of one rank's part of the batch."""
        unaveraged = not self._saw_backward and self._replicas.size() > 1
        if unaveraged and any(p.grad is not None for p in self._replicated.values()):
            raise RuntimeError(
                "An optimizer is stepped after loss.backward() in training_step. Gradients of parameters that are"
                " replicated, such as scalars, would not be averaged over ranks. Call self.manual_backward(loss)."
            )

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        step = self._open_step()
        step.accumulates = True
        yield
        step.accumulates = False

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        precision = self.precision_plugin
        assert isinstance(precision, PolicyPrecision)
        is_manual = self._in_manual_step
        if is_manual:
            self._refuse_backward_unseen()
        else:
            precision.grad_norm = None
        with explaining_shards(optimizer):
            result = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._close_step()
        if is_manual:
            return result
        if precision.grad_norm is not None and self.lightning_module is not None:
            # A tensor on the device: it is read when the logger writes, and not before.
            self.lightning_module.log("grad_norm", precision.grad_norm)
        return result

    # Teardown

    @override
    def on_train_end(self) -> None:
        self._index_reads.check()
        self._poll.compare()
        super().on_train_end()

    @override
    def teardown(self) -> None:
        undo(self)  # Lightning also calls this after an error
        self._in_effect.close()
        try:
            self.checkpoints.close()
        finally:
            super().teardown()

    # Checkpoints

    @override
    def on_train_start(self) -> None:
        self.checkpoints.begin()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self.checkpoints.module_state()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return self.checkpoints.optimizer_state(optimizer)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        self._give_buffers()  # any rank may write replicated values: they must be those of rank 0
        self.checkpoints.save(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        return self.checkpoints.load(checkpoint_path)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert isinstance(checkpoint, dict)
        self.checkpoints.check_unchanged(checkpoint)  # it was loaded by `load_checkpoint`

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return self.checkpoints.reads_optimizers_later

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self.checkpoints.load_optimizers()

    def find_last_checkpoint(self, trainer: Trainer) -> Path | None:
        """Return the checkpoint that ``ckpt_path="last"`` refers to, or None."""
        return self.checkpoints.find_last(trainer)

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        self.checkpoints.remove(filepath)

    @override
    def on_exception(self, exception: BaseException) -> None:
        note_shards(exception, strategy=type(self).__name__)
        if isinstance(exception, SIGTERMException) and exception.code is None:
            exception.code = 128 + signal.SIGTERM  # Python would exit with 0, and schedulers would see a success
        super().on_exception(exception)
        self.checkpoints.fail()
