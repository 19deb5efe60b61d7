"""The result of a trial: its figures, or the kind of its failure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

Failure = Literal["out of memory", "refused", "compiler error", "crash", "hang"]
FAILURES: tuple[Failure, ...] = get_args(Failure)

_OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED|can't allocate memory", re.I)
_COMPILERS = ("torch._dynamo", "torch._inductor", "torch._functorch", "triton")
_LAST_LINES = 6


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a trial measured. Rates are those of all devices; memory and MFU are those of one.

    Args:
        failure: The kind of failure; None: there is none.
        text: What happened.
        samples_per_s: Samples, or batches if they have no size.
        tokens_per_s: Tokens, if batches have them.
        step_s: The mean time of an optimizer step.
        spread: The distance of the quartiles of step times, as a share of the median.
        error: The standard error of the rate, as a share of it.
        steps: The number of steps after the warm-up.
        warmup: The number of steps before.
        peak_bytes: The peak of memory: allocated on a GPU, of the process on a CPU.
        mfu: Model FLOPs utilization, if it is known.
        start_s: From the start of the process to the end of the first step.
        losses: The losses of the first optimizer steps.
        schedules: Of each scheduler that counts steps, after how many optimizer steps it changes the learning rates.
        device: The name of the device.
        devices: The number of devices.
        is_pruned: Whether the trial was ended early, since it was far behind.
        wall_s: The duration of the trial.
    """

    failure: Failure | None = None
    text: str = ""
    samples_per_s: float = 0.0
    tokens_per_s: float | None = None
    step_s: float = 0.0
    spread: float = 0.0
    error: float = 0.0
    steps: int = 0
    warmup: int = 0
    peak_bytes: int = 0
    mfu: float | None = None
    start_s: float = 0.0
    losses: Sequence[float] = ()
    schedules: Sequence[int] = ()
    device: str = ""
    devices: int = 1
    is_pruned: bool = False
    wall_s: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, as plain values."""
        values = asdict(self)
        return {each.name: values[each.name] for each in fields(self) if values[each.name] != each.default}

    @property
    def failure_line(self) -> str:
        """The kind of failure and the last line of its text."""
        return f"{self.failure}: {self.text.splitlines()[-1] if self.text else ''}"

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Result":
        """Return the result that `as_dict` gave; unknown names are left out."""
        known = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})


def failure_of(error: BaseException, *, refusal: str | None) -> Result:
    """Return the failure that ``error`` is, with ``refusal`` as its text if it was raised on purpose."""
    chain = [*_chain(error)]
    text = f"{type(error).__name__}: {error}"
    if any(isinstance(each, MemoryError) or _OUT_OF_MEMORY.search(_named(each)) for each in chain):
        return Result(failure="out of memory", text=_shortened(text))
    if any(kind.__module__.startswith(_COMPILERS) for each in chain for kind in type(each).__mro__):
        return Result(failure="compiler error", text=_shortened(text))
    if refusal is not None:
        return Result(failure="refused", text=_shortened(refusal))
    return Result(failure="crash", text=_shortened(text))


def failure_of_exit(code: int, output: str) -> Result:
    """Return the failure of a process that ended with ``code`` and left no result."""
    lines = [line for line in output.splitlines() if line.strip()][-_LAST_LINES:]
    text = "\n".join(lines)
    if _OUT_OF_MEMORY.search(text):
        return Result(failure="out of memory", text=text)
    if code == -9:
        return Result(failure="out of memory", text="The process was killed by signal 9, as when host memory runs out.")
    how = f"The process was ended by signal {-code}." if code < 0 else f"The process ended with exit code {code}."
    return Result(failure="crash", text="\n".join([how, *lines]))


def _chain(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _shortened(text: str) -> str:
    return "\n".join(text.strip().splitlines()[:_LAST_LINES])[:600]
