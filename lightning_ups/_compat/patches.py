"""The register of patches: every attribute of torch, Lightning or another package that lightning_ups replaces.

Each row of ``PATCHES`` is one attribute. `applied` replaces it while a context is open, and `installed` for as long as
its owner lives. Both check the attribute first: it must exist and take the parameters that the replacement reads.
Otherwise a patch that affects results raises `PatchError`, and one that only saves time is skipped with a warning.

A replacement passes on all arguments that it does not read, so new parameters of later versions do no harm.
"""

import importlib
import inspect
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

__all__ = [
    "FSDP",
    "GROUP",
    "PARAM",
    "PATCHES",
    "PURPOSES",
    "STATE",
    "Patch",
    "PatchError",
    "Purpose",
    "applied",
    "installed",
    "why_not",
]

Make = Callable[[Any], Any]  # receives the attribute, and returns its replacement


class PatchError(RuntimeError):
    """Raised before the first step if a needed patch does not fit the installed version of its package."""


class Purpose(NamedTuple):
    """The purpose of a group of patches.

    Args:
        text: What they do, as an infinitive.
        feature: The feature that needs them, which a user can turn off.
    """

    text: str
    feature: str


class Patch(NamedTuple):
    """One attribute that is replaced.

    Args:
        purpose: A key of ``PURPOSES``.
        test: The name of the test that fails without it.
        reads: Parameters that the replacement reads.
        only_speed: Whether results are the same without it.
        versions: The versions of the package with this attribute, if not all supported ones have it.
        issue: The upstream issue, if there is one.
    """

    purpose: str
    test: str
    reads: tuple[str, ...] = ()
    only_speed: bool = False
    versions: str = ""
    issue: str = ""


PURPOSES = {
    "compiled-gradients": Purpose(
        "keep gradients and random numbers of compiled code right where it is sharded or recomputed",
        "SimpleFSDPStrategy or ActivationCheckpoint(memory_budget=...)",
    ),
    "compiled-speed": Purpose(
        "let compiled blocks share graphs, group their collectives, launch less and replay CUDA graphs in some calls",
        "Compile",
    ),
    "fsdp2": Purpose("gather, reduce and free parameters for modules that FSDP2 alone gets wrong", "FSDP2Strategy"),
    "fsdp2-speed": Purpose("copy gathered parameters and gradients with less waiting", "FSDP2Strategy"),
    "shards": Purpose(
        "let code of users and of Lightning read and write sharded parameters", "FSDP2Strategy or SimpleFSDPStrategy"
    ),
    "meta-device": Purpose("see how a Hugging Face model initializes itself on the meta device", "configure_model"),
    "logging": Purpose("log without waiting for the GPU and with less work for the host", "AccelerationFlags"),
    "data": Purpose("know which batch and which checkpoint a run is at", "ExactResume, DevicePrefetch or a strategy"),
    "steps": Purpose("act between backward and step, and stop all ranks at the same step", "StepGuard or a strategy"),
    "measuring": Purpose("count where the host waits for the GPU", "TokenThroughput"),
}

FSDP = "torch.distributed.fsdp._fully_shard."
GROUP = f"{FSDP}_fsdp_param_group:FSDPParamGroup"
STATE = f"{FSDP}_fsdp_state:FSDPState"
PARAM = f"{FSDP}_fsdp_param:FSDPParam"
_DTENSOR = "torch.distributed.tensor:DTensor"
_CONNECTORS = "lightning.pytorch.trainer.connectors."
_WORKERS = "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter"

PATCHES = {
    "torch._functorch.partitioners:fx_graph_cse": Patch(
        "compiled-gradients", "test_parameters_with_equal_gradients_share_no_memory"
    ),
    "torch._functorch.partitioners:functionalize_rng_ops": Patch(
        "compiled-gradients",
        "test_recomputed_random_numbers_are_those_of_the_forward",
        reads=("bw_module", "num_sym_nodes"),
        versions=">=2.13",
    ),
    "torch._functorch.partitioners:choose_saved_values_set": Patch(
        "compiled-gradients",
        "test_what_a_budget_recomputes_has_the_random_numbers_of_the_forward",
        reads=("node_info", "memory_budget"),
    ),
    "torch._dynamo.variables.nn_module:guard_to_detect_forward_monkeypatching": Patch(
        "compiled-speed",
        "test_blocks_are_one_graph_and_train_as_uncompiled",
        only_speed=True,
    ),
    "torch._dynamo.convert_frame:get_and_maybe_log_recompilation_reasons": Patch(
        "compiled-speed",
        "test_of_several_guards_that_is_known_which_tells_most",
        only_speed=True,
    ),
    "torch._inductor.choices:InductorChoices.reduction_split_factor": Patch(
        "compiled-speed",
        "test_much_is_reduced_in_aligned_pieces_of_one_size",
        reads=("reduction_numel_hint", "inner_reduction"),
        only_speed=True,
    ),
    "torch._higher_order_ops.triton_kernel_wrap:identify_accessed_tensors": Patch(
        "compiled-speed",
        "test_kernels_are_parsed_once_for_each_kind_of_launch_and_graphs_are_the_same",
        only_speed=True,
        versions=">=2.13",
    ),
    "torch._higher_order_ops.triton_kernel_wrap:identify_mutated_tensors": Patch(
        "compiled-speed",
        "test_kernels_are_parsed_once_for_each_kind_of_launch_and_graphs_are_the_same",
        only_speed=True,
        versions="<2.13",
    ),
    "torch.utils._runtime_estimation:get_gpu_dram_gbps": Patch(
        "compiled-speed", "test_a_block_gathers_once_and_reduces_once_in_each_direction", versions=">=2.13"
    ),
    "torch._inductor.fx_passes.overlap_manual_scheduling:get_full_bucket_key": Patch(
        "compiled-speed",
        "test_a_block_gathers_once_and_reduces_once_in_each_direction",
        reads=("node",),
        only_speed=True,
        versions=">=2.13",
    ),
    "torch._inductor.fx_passes.overlap_manual_scheduling:bucket_key": Patch(
        "compiled-speed",
        "test_a_block_gathers_once_and_reduces_once_in_each_direction",
        reads=("node",),
        only_speed=True,
        versions="<2.13",
    ),
    "torch._C._nn:cross_entropy_loss": Patch(
        "compiled-speed", "test_a_large_cross_entropy_in_a_step_is_compiled", only_speed=True
    ),
    "torch._inductor.compile_fx:cudagraphify": Patch(
        "compiled-speed",
        "test_one_compilation_by_inductor_is_launched_and_replayed",
        reads=("model", "static_input_idxs", "is_backward", "mutated_input_idxs"),
    ),
    "torch._inductor.output_code:maybe_handle_backward_generation": Patch(
        "compiled-speed", "test_one_compilation_by_inductor_is_launched_and_replayed"
    ),
    f"{STATE}._pre_backward": Patch(
        "fsdp2", "test_one_that_makes_a_graph_keeps_what_is_gathered_until_that_of_the_loss_ends"
    ),
    f"{STATE}._root_post_backward_final_callback": Patch(
        "fsdp2", "test_one_that_makes_a_graph_keeps_what_is_gathered_until_that_of_the_loss_ends"
    ),
    f"{STATE}._register_pre_backward_hook": Patch("fsdp2", "test_tensors_of_objects_announce_their_backward"),
    f"{GROUP}.reshard": Patch(
        "fsdp2", "test_one_that_makes_a_graph_keeps_what_is_gathered_until_that_of_the_loss_ends"
    ),
    f"{GROUP}.post_backward": Patch(
        "fsdp2", "test_what_is_summed_before_it_is_reduced_over_copies_is_each_parameters_own"
    ),
    f"{PARAM}.to_unsharded": Patch("fsdp2", "test_what_was_found"),
    f"{PARAM}.init_dtype_attrs": Patch("fsdp2", "test_shards_train_the_same", reads=("mp_policy",)),
    f"{PARAM}.init_unsharded_param": Patch("fsdp2", "test_shards_train_the_same"),
    f"{FSDP}_fsdp_param_group:foreach_all_gather_copy_out": Patch(
        "fsdp2-speed", "test_a_copy_waits_for_what_was_freed_and_computing_for_the_copy", only_speed=True
    ),
    f"{GROUP}._to_sharded": Patch(
        "fsdp2-speed", "test_a_copy_waits_for_what_was_freed_and_computing_for_the_copy", only_speed=True
    ),
    f"{GROUP}._to_sharded_post_forward": Patch(
        "fsdp2-speed", "test_a_copy_waits_for_what_was_freed_and_computing_for_the_copy", only_speed=True
    ),
    f"{FSDP}_fsdp_collectives:foreach_reduce_scatter_copy_in": Patch(
        "fsdp2-speed",
        "test_it_is_asked_for_each_group_and_not_a_bit_changes",
        reads=("unsharded_grads", "reduce_scatter_input", "world_size"),
        only_speed=True,
    ),
    f"{_DTENSOR}.data": Patch("shards", "test_values_that_are_set_are_the_shards"),
    f"{_DTENSOR}.__getitem__": Patch("shards", "test_what_is_assigned_to_an_index_is_kept"),
    f"{_DTENSOR}.__setitem__": Patch("shards", "test_what_is_assigned_to_an_index_is_kept"),
    **{
        f"{_DTENSOR}.{name}": Patch("shards", "test_what_a_shard_makes_is_plain")
        for name in ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")
    },
    "torch.autograd:grad": Patch(
        "shards",
        "test_gradients_of_shards_are_refused_and_others_are_not",
        reads=("inputs",),
    ),
    "torch.autograd:Function.apply": Patch(
        "shards",
        "test_inputs_of_functions_of_users_are_changed_and_of_distributed_ones_not",
    ),
    "lightning.pytorch.callbacks:BaseFinetuning.filter_on_optimizer": Patch(
        "shards",
        "test_parameters_of_both_kinds_differ_from_equal_ones",
        reads=("optimizer", "params"),
    ),
    "lightning.pytorch:LightningModule._LightningModule__to_tensor": Patch(
        "shards",
        "test_norms_of_shards_are_logged_as_those_of_whole_tensors",
        reads=("value",),
    ),
    "lightning.pytorch.utilities.grads:torch": Patch(
        "shards", "test_norms_of_shards_are_logged_as_those_of_whole_tensors"
    ),
    "transformers.modeling_utils:PreTrainedModel.init_weights": Patch(
        "meta-device", "test_a_model_initialises_itself_on_meta_only_while_asked"
    ),
    f"{_CONNECTORS}logger_connector.result:_ResultMetric.to": Patch(
        "logging",
        "test_a_record_is_walked_through_once_and_not_at_each_step",
        only_speed=True,
    ),
    "lightning.pytorch.profilers:PassThroughProfiler.profile": Patch(
        "logging",
        "test_a_profiler_times_each_hook_and_without_one_nothing_is_timed",
        reads=("action_name",),
        only_speed=True,
    ),
    "lightning.pytorch.callbacks:LearningRateMonitor._extract_stats": Patch(
        "logging",
        "test_no_number_that_is_logged_is_copied_to_the_device",
        only_speed=True,
    ),
    f"{_CONNECTORS}checkpoint_connector:_CheckpointConnector._parse_ckpt_path": Patch(
        "data",
        "test_on_exception_checkpoints_and_those_that_are_torn",
        reads=("state_fn", "ckpt_path"),
    ),
    f"{_CONNECTORS}checkpoint_connector:_CheckpointConnector.resume_start": Patch(
        "data",
        "test_rolling_back_restricts_loading_like_fit",
        reads=("checkpoint_path", "weights_only"),
    ),
    "lightning.pytorch.loops.fit_loop:_FitLoop._load_combined_loader_states": Patch(
        "data", "test_loaders_are_followed_until_undone"
    ),
    "lightning.pytorch.strategies:Strategy.batch_to_device": Patch(
        "data",
        "test_only_the_transfer_of_training_batches_is_within_the_context",
        reads=("batch", "device", "dataloader_idx"),
    ),
    f"{_WORKERS}._next_data": Patch("data", "test_nobody_can_tell"),
    f"{_WORKERS}._reset": Patch("data", "test_workers_that_live_on_begin_anew"),
    "lightning.pytorch.plugins.precision:Precision._after_closure": Patch(
        "steps",
        "test_it_comes_after_all_hooks_and_before_the_step_with_the_gradients_there",
        reads=("model", "optimizer"),
    ),
    "lightning.pytorch.loops.training_epoch_loop:_TrainingEpochLoop._broadcast_sigterm_tensor": Patch(
        "steps", "test_every_rank_stops_at_the_same_step"
    ),
    f"{_CONNECTORS}signal_connector:_SignalConnector._sigterm_notifier_fn": Patch(
        "steps", "test_every_rank_stops_at_the_same_step", reads=("signum",)
    ),
    f"{_CONNECTORS}signal_connector:_SignalConnector._slurm_sigusr_handler_fn": Patch(
        "steps", "test_every_rank_is_requeued_once_and_at_the_same_step", reads=("signum",)
    ),
    "torch.cuda:synchronize": Patch("measuring", "test_places_that_wait_are_counted"),
    "warnings:showwarning": Patch("measuring", "test_places_that_wait_are_counted", reads=("message",)),
}


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


def _fits(target: str, *, only_speed: bool) -> bool:
    reason = why_not(target)
    if reason is None:
        return True
    patch, purpose = PATCHES[target], PURPOSES[PATCHES[target].purpose]
    package = target.partition(".")[0]
    text = (
        f"lightning_ups replaces {target.replace(':', '.')} to {purpose.text}, which {_named(package)} does not allow:"
    )
    if patch.only_speed or only_speed:
        warnings.warn(f"{text} {reason}. It goes without, and may be slower.", stacklevel=4)
        return False
    raise PatchError(
        f"{text} {reason}. {purpose.feature} needs this. Install a version of {package} that lightning_ups was tested"
        " with: pip install --upgrade lightning_ups"
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
        self._sharing: set[object] = set()
        self._own: Any = _MISSING  # the owner's own attribute, which may also be inherited
        self._original: Any = _MISSING
        self._set: Any = _MISSING

    def add(self, token: object, make: Make, *, once: bool) -> None:
        if not self._makers:
            self._own = vars(self._owner).get(self._name, _MISSING)
            look = inspect.getattr_static if isinstance(self._owner, type) else getattr
            self._original = look(self._owner, self._name, None)
        if once and self._makers:
            self._sharing.add(token)
            return
        self._makers[token] = make
        self._update()

    def remove(self, token: object) -> None:
        if token in self._sharing:
            self._sharing.remove(token)
            return
        make = self._makers.pop(token)
        if self._sharing:
            self._makers[self._sharing.pop()] = make
            return
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
        made, kind = self._original, _same
        if isinstance(self._owner, type):
            if isinstance(made, staticmethod):
                made, kind = made.__func__, staticmethod
            elif isinstance(made, classmethod) or type(made).__name__ == "classmethod_descriptor":
                made, kind = _called_on_class(made), classmethod
        for make in self._makers.values():
            made = make(made)
        return kind(made)


def _same(value: Any) -> Any:
    return value


def _called_on_class(method: Any) -> Callable[..., Any]:
    return lambda cls, *args, **kwargs: method.__get__(None, cls)(*args, **kwargs)
