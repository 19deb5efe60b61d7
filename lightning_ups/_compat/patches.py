"""The register of patches: every attribute of torch, Lightning or another package that lightning_ups replaces.

Each purpose has its patches, each of one attribute. `applied` replaces it while a context is open, and `installed` for
as long as its owner lives. Both check the attribute first: it must exist and take the parameters that the replacement
reads. Otherwise a patch that affects results raises `PatchError`; one that only saves time is skipped with a warning.

A replacement passes on all arguments that it does not read, so new parameters of later versions do no harm.
"""

import importlib
import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from packaging.specifiers import SpecifierSet

Make = Callable[[Any], Any]  # receives the attribute, and returns its replacement


class PatchError(RuntimeError):
    """Raised before the first step if a needed patch does not fit the installed version of its package."""


class Patch(NamedTuple):
    """One attribute that is replaced.

    Args:
        reads: Parameters that the replacement reads.
        only_speed: Whether results are the same without it.
        versions: Of the package, which have the attribute. Empty: all.
    """

    reads: tuple[str, ...] = ()
    only_speed: bool = False
    versions: str = ""


class Purpose(NamedTuple):
    """A group of patches.

    Args:
        text: What they do, as an infinitive.
        feature: The feature that needs them, which a user can turn off.
        test: The name of a test that fails without them.
        patches: By attribute.
    """

    text: str
    feature: str
    test: str
    patches: dict[str, Patch]


FSDP = "torch.distributed.fsdp._fully_shard."
GROUP = f"{FSDP}_fsdp_param_group:FSDPParamGroup"
STATE = f"{FSDP}_fsdp_state:FSDPState"
PARAM = f"{FSDP}_fsdp_param:FSDPParam"
_PARTITIONERS = "torch._functorch.partitioners"
_KERNELS = "torch._higher_order_ops.triton_kernel_wrap"
_OVERLAP = "torch._inductor.fx_passes.overlap_manual_scheduling"
_DTENSOR = "torch.distributed.tensor:DTensor"
_CONNECTORS = "lightning.pytorch.trainer.connectors."
_CHECKPOINTS = f"{_CONNECTORS}checkpoint_connector:_CheckpointConnector"
_SIGNALS = f"{_CONNECTORS}signal_connector:_SignalConnector"
_WORKERS = "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter"

_PATCH, _SPEED = Patch(), Patch(only_speed=True)
PURPOSES = (
    Purpose(
        "keep gradients and random numbers right in compiled code that is sharded or recomputed",
        feature="SimpleFSDPStrategy, tensor parallelism or ActivationCheckpoint(memory_budget=...)",
        test="test_parameters_with_equal_gradients_share_no_memory",
        patches={
            f"{_PARTITIONERS}:fx_graph_cse": _PATCH,
            f"{_PARTITIONERS}:functionalize_rng_ops": Patch(("bw_module", "num_sym_nodes"), versions=">=2.13"),
            f"{_PARTITIONERS}:choose_saved_values_set": Patch(("node_info", "memory_budget")),
        },
    ),
    Purpose(
        "let compiled blocks share graphs, group their collectives, launch less and replay CUDA graphs in some calls",
        feature="Compile",
        test="test_blocks_are_one_graph_and_train_as_uncompiled",
        patches={
            "torch._dynamo.variables.nn_module:guard_to_detect_forward_monkeypatching": _SPEED,
            "torch._dynamo.convert_frame:get_and_maybe_log_recompilation_reasons": _SPEED,
            "torch._inductor.choices:InductorChoices.reduction_split_factor": Patch(
                ("reduction_numel_hint", "inner_reduction"), only_speed=True
            ),
            f"{_KERNELS}:identify_accessed_tensors": Patch(only_speed=True, versions=">=2.13"),
            f"{_KERNELS}:identify_mutated_tensors": Patch(only_speed=True, versions="<2.13"),
            "torch.utils._runtime_estimation:get_gpu_dram_gbps": Patch(only_speed=True, versions=">=2.13"),
            f"{_OVERLAP}:get_full_bucket_key": Patch(("node",), only_speed=True, versions=">=2.13"),
            f"{_OVERLAP}:bucket_key": Patch(("node",), only_speed=True, versions="<2.13"),
            "torch._C._nn:cross_entropy_loss": _SPEED,
            "torch._inductor.compile_fx:cudagraphify": Patch(
                ("model", "static_input_idxs", "is_backward", "mutated_input_idxs")
            ),
            "torch._inductor.output_code:maybe_handle_backward_generation": _PATCH,
        },
    ),
    Purpose(
        "gather, reduce and free parameters for modules that FSDP2 alone gets wrong",
        feature="FSDP2Strategy",
        test="test_tensors_of_objects_announce_their_backward",
        patches={
            f"{STATE}._pre_backward": _PATCH,
            f"{STATE}._root_post_backward_final_callback": _PATCH,
            f"{STATE}._register_pre_backward_hook": _PATCH,
            f"{GROUP}.reshard": _PATCH,
            f"{GROUP}.post_backward": _PATCH,
            f"{PARAM}.to_unsharded": _PATCH,
            f"{PARAM}.init_dtype_attrs": Patch(("mp_policy",)),
            f"{PARAM}.init_unsharded_param": _PATCH,
        },
    ),
    Purpose(
        "copy gathered parameters and gradients with less waiting",
        feature="FSDP2Strategy",
        test="test_it_is_asked_for_each_group_and_not_a_bit_changes",
        patches={
            f"{FSDP}_fsdp_param_group:foreach_all_gather_copy_out": _SPEED,
            f"{GROUP}._to_sharded": _SPEED,
            f"{GROUP}._to_sharded_post_forward": _SPEED,
            f"{FSDP}_fsdp_collectives:foreach_reduce_scatter_copy_in": Patch(
                ("unsharded_grads", "reduce_scatter_input", "world_size"), only_speed=True
            ),
        },
    ),
    Purpose(
        "let code of users and of Lightning read and write sharded parameters",
        feature="FSDP2Strategy or SimpleFSDPStrategy",
        test="test_values_that_are_set_are_the_shards",
        patches={
            f"{_DTENSOR}.data": _PATCH,
            f"{_DTENSOR}.__getitem__": _PATCH,
            f"{_DTENSOR}.__setitem__": _PATCH,
            f"{_DTENSOR}.new_empty": _PATCH,
            f"{_DTENSOR}.new_full": _PATCH,
            f"{_DTENSOR}.new_ones": _PATCH,
            f"{_DTENSOR}.new_tensor": _PATCH,
            f"{_DTENSOR}.new_zeros": _PATCH,
            "torch.autograd:grad": Patch(("inputs",)),
            "torch.autograd:Function.apply": _PATCH,
            "lightning.pytorch.callbacks:BaseFinetuning.filter_on_optimizer": Patch(("optimizer", "params")),
            "lightning.pytorch:LightningModule._LightningModule__to_tensor": Patch(("value",)),
            "lightning.pytorch.utilities.grads:torch": _PATCH,
        },
    ),
    Purpose(
        "see how a Hugging Face model initializes itself on the meta device, read its weights one by one,"
        " and leave out masks that compiled code does not need",
        feature="configure_model",
        test="test_a_model_initialises_itself_on_meta_only_while_asked",
        patches={
            "transformers.modeling_utils:PreTrainedModel.init_weights": _PATCH,
            "transformers.modeling_utils:safe_open": _PATCH,
            "transformers.masking_utils:find_packed_sequence_indices": Patch(("position_ids",), only_speed=True),
            "transformers.masking_utils:is_torchdynamo_exporting": _SPEED,
        },
    ),
    Purpose(
        "log without waiting for the GPU and with less work for the host",
        feature="AccelerationFlags",
        test="test_no_number_that_is_logged_is_copied_to_the_device",
        patches={
            f"{_CONNECTORS}logger_connector.result:_ResultMetric.to": _SPEED,
            "lightning.pytorch.profilers:PassThroughProfiler.profile": Patch(("action_name",), only_speed=True),
            "lightning.pytorch.callbacks:LearningRateMonitor._extract_stats": _SPEED,
        },
    ),
    Purpose(
        "know which batch and which checkpoint a run is at",
        feature="ExactResume, DevicePrefetch or a strategy",
        test="test_loaders_are_followed_until_undone",
        patches={
            f"{_CHECKPOINTS}._parse_ckpt_path": Patch(("state_fn", "ckpt_path")),
            f"{_CHECKPOINTS}.resume_start": Patch(("checkpoint_path", "weights_only")),
            "lightning.pytorch.loops.fit_loop:_FitLoop._load_combined_loader_states": _PATCH,
            "lightning.pytorch.loops.fit_loop:_FitLoop.setup_data": _PATCH,
            "lightning.pytorch.strategies:Strategy.batch_to_device": Patch(("batch", "device", "dataloader_idx")),
            f"{_WORKERS}._next_data": _PATCH,
            f"{_WORKERS}._reset": _PATCH,
        },
    ),
    Purpose(
        "act between backward and step, replay a whole step, and stop all ranks at the same step",
        feature="StepGuard, StepGraph or a strategy",
        test="test_every_rank_stops_at_the_same_step",
        patches={
            "lightning.pytorch.plugins.precision:Precision._after_closure": Patch(("model", "optimizer")),
            "lightning.pytorch.loops.optimization.automatic:_AutomaticOptimization.run": Patch(
                ("optimizer", "batch_idx", "kwargs")
            ),
            "lightning.pytorch.loops.training_epoch_loop:_TrainingEpochLoop._broadcast_sigterm_tensor": _PATCH,
            f"{_SIGNALS}._sigterm_notifier_fn": Patch(("signum",)),
            f"{_SIGNALS}._slurm_sigusr_handler_fn": Patch(("signum",)),
        },
    ),
    Purpose(
        "count where the host waits for the GPU",
        feature="TokenThroughput",
        test="test_places_that_wait_are_counted",
        patches={
            "torch.cuda:synchronize": _PATCH,
            "warnings:showwarning": Patch(("message",)),
        },
    ),
)
PATCHES = {target: patch for purpose in PURPOSES for target, patch in purpose.patches.items()}


_MISSING: Any = object()
_LOCK = threading.RLock()
_PLACES: dict[tuple[int, str], "_Place"] = {}  # current replacements


@contextmanager
def applied(
    target: str, make: Make, *, owner: Any = None, once: bool = False, only_speed: bool = False
) -> Iterator[None]:
    """Replace the attribute ``target`` by ``make(original)`` while the context is open.

    Contexts may be closed in any order.

    Args:
        target: A key of ``PATCHES``.
        make: Returns the replacement. It may be called several times.
        owner: The instance whose attribute is replaced, instead of that of the class.
        once: Let contexts that are open at the same time share the first replacement.
        only_speed: As in `Patch`, if other users of the row depend on the patch for their results.

    Raises:
        PatchError: If the attribute does not match, and results depend on the patch.
    """
    if not _fits(target, only_speed=only_speed):
        yield
        return
    place = _place(target, owner)
    token = object()
    with _LOCK:
        place.add(token, make, once=once)
    try:
        yield
    finally:
        with _LOCK:
            place.remove(token)


def installed(target: str, owner: Any, make: Make) -> None:
    """Replace the attribute ``target`` of the instance ``owner`` for as long as it lives.

    Raises:
        PatchError: If the attribute does not match, and results depend on the patch.
    """
    if _fits(target, only_speed=False):
        name = target.rpartition(".")[2]
        setattr(owner, name, make(getattr(owner, name)))


@cache
def why_not(target: str) -> str | None:
    """Return why the attribute ``target`` cannot be replaced, or None."""
    try:
        holder, name = _resolve(target)
    except (ImportError, AttributeError) as error:
        return str(error)
    if not hasattr(holder, name):
        return f"{target.replace(':', '.')} does not exist"
    try:
        parameters = inspect.signature(getattr(holder, name)).parameters.values()
    except (TypeError, ValueError):  # a C++ function, or not a function
        return None
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        return None
    missing = [each for each in PATCHES[target].reads if each not in {parameter.name for parameter in parameters}]
    return f"{name}() has no parameter {', '.join(missing)}" if missing else None


def misfits() -> dict[str, str]:
    """Return each attribute that cannot be replaced in the installed version of its package, and the reason."""
    return {target: reason for target in PATCHES if _is_here(target) and (reason := why_not(target))}


def _is_here(target: str) -> bool:
    package = target.partition(":")[0].partition(".")[0]
    if package in sys.stdlib_module_names:
        return True
    try:
        return SpecifierSet(PATCHES[target].versions).contains(version(package), prereleases=True)
    except PackageNotFoundError:
        return False


def _fits(target: str, *, only_speed: bool) -> bool:
    reason = why_not(target)
    if reason is None:
        return True
    package = target.partition(".")[0]
    text = f"lightning_ups replaces {target.replace(':', '.')}, but {_named(package)} differs: {reason}."
    if PATCHES[target].only_speed or only_speed:
        warnings.warn(f"{text} This patch is left out, which may be slower.", stacklevel=4)
        return False
    feature = next((purpose.feature for purpose in PURPOSES if target in purpose.patches), "the feature that needs it")
    raise PatchError(
        f"{text} Leave out {feature}, or install a tested version of {package}: pip install --upgrade lightning_ups"
    )


def _named(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return package


def _resolve(target: str) -> tuple[Any, str]:
    module, _, path = target.partition(":")
    *classes, name = path.split(".")
    holder: Any = importlib.import_module(module)
    for each in classes:
        holder = getattr(holder, each)
    return holder, name


def _place(target: str, owner: Any) -> "_Place":
    holder, name = _resolve(target)
    holder = holder if owner is None else owner
    with _LOCK:
        return _PLACES.setdefault((id(holder), name), _Place(holder, name))


class _Place:
    """A replaced attribute and its replacements: each of several gets the previous one."""

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self._name = owner, name
        self._makers: dict[object, Make] = {}
        self._shared = False  # the first replacement stays until the last context closes
        self._own: Any = _MISSING  # the owner's own attribute, which may also be inherited
        self._original: Any = _MISSING
        self._set: Any = _MISSING

    def add(self, token: object, make: Make, *, once: bool) -> None:
        if not self._makers:
            self._own = vars(self._owner).get(self._name, _MISSING)
            look = inspect.getattr_static if isinstance(self._owner, type) else getattr
            self._original = look(self._owner, self._name, None)
        self._makers[token], self._shared = make, once
        if not once or len(self._makers) == 1:
            self._update()

    def remove(self, token: object) -> None:
        del self._makers[token]
        if not (self._shared and self._makers):
            self._update()
        if not self._makers:
            _PLACES.pop((id(self._owner), self._name), None)

    def _update(self) -> None:
        now = vars(self._owner).get(self._name, _MISSING)
        if self._set is not _MISSING and now is not self._set:
            return  # other code has replaced it since, and calls our replacement
        if self._makers:
            self._set = self._made()
            setattr(self._owner, self._name, self._set)
            return
        self._set = _MISSING
        if self._own is _MISSING:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._own)

    def _made(self) -> Any:
        made: Any = self._original
        kind: Any = None
        if isinstance(self._owner, type):
            if isinstance(made, staticmethod):
                made, kind = made.__func__, staticmethod
            elif isinstance(made, classmethod) or type(made).__name__ == "classmethod_descriptor":
                made, kind = _called_on_class(made), classmethod
        for make in self._makers.values():
            made = make(made)
        return made if kind is None else kind(made)


def _called_on_class(method: Any) -> Callable[..., Any]:
    return lambda cls, *args, **kwargs: method.__get__(None, cls)(*args, **kwargs)
