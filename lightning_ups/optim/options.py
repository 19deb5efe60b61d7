"""The options in a saved state, of which an optimizer reads its own: torch takes any, and fails in the first step."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from lightning_ups._compat.torch.optimizers import before_loading
from lightning_ups.optim.low_bit import innermost

__all__ = ["check_options", "refuse_state_of_others"]


def refuse_state_of_others(optimizers: Iterable[Optimizer]) -> list[Callable[[], None]]:
    """Let each of ``optimizers`` call `check_options` before it loads a state, and return what undoes that."""
    return [before_loading(optimizer, _check) for optimizer in map(innermost, optimizers)]


def _check(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    check_options(optimizer, state_dict["param_groups"])


def check_options(optimizer: Optimizer, saved: Sequence[Mapping[str, Any]]) -> None:
    """Refuse ``saved``, the groups of a state, if they lack an option that ``optimizer`` has, and have others.

    What its class fills in, for checkpoints of older versions, may be missing, and what only its constructor reads.
    """
    groups, optimizer = optimizer.param_groups, innermost(optimizer)
    options = [name for name in optimizer.defaults if all(name in group for group in groups)]
    has_others = any(group.keys() - {"param_names"} - optimizer.defaults.keys() - groups[0].keys() for group in saved)
    if has_others and _lacking(options, saved) and (lacking := _lacking(options, _filled_in(optimizer, saved))):
        name = type(optimizer).__name__
        raise ValueError(
            f"The checkpoint was saved by another optimizer than {name}: its groups have no {', '.join(lacking)}, which"
            f" {name} reads in every step. Resume with the optimizer that saved it, or begin with its weights alone:"
            " leave out ckpt_path, and call lightning_ups.state.checkpoint.load_weights in on_fit_start."
        )


def _lacking(options: Sequence[str], groups: Sequence[Mapping[str, Any]]) -> list[str]:
    return [name for name in options if any(name not in group for group in groups)]


def _filled_in(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    alike: Any = object.__new__(type(optimizer))
    vars(alike).update(vars(optimizer))
    alike.__setstate__({"state": defaultdict(dict), "param_groups": [{**group, "params": []} for group in groups]})
    return alike.param_groups
