"""The decision tree of ``diagnose``: each cause with its condition, threshold, sentence and fix."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


class Facts(dict[str, Any]):
    """What the experiments found; a number that was not measured is 0."""

    def __missing__(self, name: str) -> Any:
        return 0.0

    def share(self, phase: str) -> float:
        """Return the share of ``phase`` in a step."""
        return (self.get("shares") or {}).get(phase, 0.0)

    def of_host(self, phase: str) -> float:
        """Return the share of a step that the host spends in ``phase``, a hook or logging, or the device waits for.

        A device that idles waits for all that the host does, also after the phase: its queue is empty then.
        """
        device = (self.get("hooks") or {}).get(phase, self.share(phase))
        return max(device, min((self.get("host") or {}).get(phase, 0.0), self["idle"]))

    def of_step(self, seconds: str, *, of: str = "mean_s") -> float:
        """Return the fact ``seconds`` as a share of a step."""
        return self[seconds] / self[of] if self[of] else 0.0

    @property
    def on_gpu(self) -> bool:
        """Whether the run is on a GPU."""
        return self.get("device") not in (None, "cpu")

    @property
    def worst_hook(self) -> tuple[str, float]:
        """The hook of a callback or module that takes the most time, and its share."""
        return max(((name, self.of_host(name)) for name in self.get("hooks") or [""]), key=lambda each: each[1])

    @property
    def unexplained_idle(self) -> float:
        """The share of a step in which the GPU is idle, without what other causes name."""
        known = sum(map(self.share, ("data", "transfer", "checkpoint", "between epochs")))
        known += sum(map(self.of_host, ("logging", *(self.get("hooks") or ())))) + max(0.0, _optimizer_excess(self))
        return max(0.0, self["idle"] - known)


@dataclass(frozen=True, kw_only=True)
class Fix:
    """What to change, and how to try it once.

    Args:
        text: YAML or Python lines.
        options: Options of ``fit`` that make the change.
        loader: Arguments of each DataLoader that make it.
        optimizer: Values of parameter groups that make it.
    """

    text: str
    options: Sequence[str] = ()
    loader: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)

    @property
    def can_be_tried(self) -> bool:
        """Whether it can be tried without the user."""
        return bool(self.options or self.loader or self.optimizer)


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One row of the tree.

    Args:
        name: Two or three words.
        lost: Returns the share of a step that it costs.
        least: The threshold of that share.
        sentence: Returns the sentence that the report begins with.
        fix: Returns the fix.
        unless: Causes that explain the same figures; if one reaches its threshold, this one does not count.
    """

    name: str
    lost: Callable[[Facts], float]
    least: float
    sentence: Callable[[Facts], str]
    fix: Callable[[Facts], Fix]
    unless: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A cause that reached its threshold."""

    name: str
    lost: float
    sentence: str
    fix: Fix


def findings(facts: Mapping[str, Any]) -> list[Finding]:
    """Return what reached its threshold, the most expensive first."""
    seen = Facts(facts)
    lost = {cause.name: cause.lost(seen) for cause in TREE}
    reached = {cause.name for cause in TREE if lost[cause.name] >= cause.least}
    found = [
        Finding(name=cause.name, lost=lost[cause.name], sentence=cause.sentence(seen), fix=cause.fix(seen))
        for cause in TREE
        if cause.name in reached and not reached.intersection(cause.unless)
    ]
    return sorted(found, key=lambda finding: -finding.lost)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _data_options(facts: Facts, **settings: Any) -> list[str]:
    for owner, key in (("data", "data_settings"), ("model", "model_settings")):
        if all(name in (facts.get(key) or ()) for name in settings):
            return [f"--{owner}.{name}={str(value).lower()}" for name, value in settings.items()]
    return []


def _loader_fix(facts: Facts, **settings: Any) -> Fix:
    options = _data_options(facts, **settings)
    if options:
        owner = options[0].removeprefix("--").partition(".")[0]
        pairs = ", ".join(f"{name}: {str(value).lower()}" for name, value in settings.items())
        return Fix(text=f"{owner}:\n  init_args: {{{pairs}}}", options=options)
    given = ", ".join(f"{name}={value}" for name, value in settings.items())
    return Fix(text=f"DataLoader(..., {given})", loader=settings)


def _more_workers(facts: Facts) -> Fix:
    workers, cores = int(facts["workers"]), int(facts["cores"] or 1)
    if workers >= max(cores, 2):
        return Fix(text="# All cores load data already: prepare the data ahead of training, or decode it more cheaply.")
    return _loader_fix(facts, num_workers=min(max(cores, 2), max(2, 2 * workers)))


def _loading(facts: Facts) -> str:
    waits = f"The step waits for data {_percent(facts.share('data'))} of the time"
    if not facts["loader_rate"] or not facts["device_rate"]:
        return waits
    rates = f"{facts['loader_rate']:,.0f} samples/s", f"{facts['device_rate']:,.0f}"
    device, workers = "GPU" if facts.on_gpu else "model", int(facts["workers"])
    if not workers:
        return f"{waits}: no worker loads batches ahead; the loader alone reaches {rates[0]}, the {device} {rates[1]}"
    who = "1 worker loads" if workers == 1 else f"{workers} workers load"
    return f"{waits}: {who} {rates[0]}, the {device} could take {rates[1]}"


def _idle(facts: Facts, *, waits: bool) -> float:
    return facts.unexplained_idle if bool(facts.get("waits")) == waits else 0.0


def _fixed_cost(facts: Facts) -> float:
    is_full = facts["memory_used"] > 0.8  # of a GPU: twice the batch would not fit
    rates = [facts[f"rate_{name}"] for name in ("half", "same", "twice")]
    if is_full or not facts["full_s"] or not all(rates):
        return 0.0
    half, same, twice = (size * facts["batch_size"] / rate for size, rate in zip((0.5, 1, 2), rates, strict=True))
    same = min(same, facts["backward_s"] or same)  # measured twice: other load on the host only adds time
    # Without what a step costs whatever its size, twice the batch would take twice the time.
    fixed = min(2 * same - twice, 2 * half - same)
    return (fixed - max(0.0, facts["exchange_s"] - facts["silent_s"])) / facts["full_s"]


def _slow_exchange(facts: Facts) -> float:
    return max(facts.get("exposed") or 0.0, (facts["exchange_s"] - facts["silent_s"]) / (facts["mean_s"] or 1.0))


def _optimizer_excess(facts: Facts) -> float:
    if not facts["reference_optimizer_s"]:
        return 0.0
    reference = 1.5 * facts["reference_optimizer_s"] / (facts["accumulate"] or 1)
    return facts.share("optimizer") - reference / (facts["mean_s"] or 1.0)


def _optimizer_fix(facts: Facts) -> Fix:
    name = facts.get("optimizer_class") or "AdamW"
    if facts.get("is_torch_optimizer") and not facts.get("is_fused"):
        text = f"torch.optim.{name}(..., fused=True)  # in a section optimizer: init_args: {{fused: true}}"
        return Fix(text=text, optimizer={"fused": True, "foreach": False})
    return Fix(text="torch.optim.AdamW(self.parameters(), lr=..., fused=True)  # one kernel for all parameters")


def _thrashing(facts: Facts) -> float:
    if not facts.on_gpu or max(facts["allocations_per_step"], facts["retries_per_step"]) < 0.1:
        return 0.0
    known = sum(map(facts.share, ("data", "transfer", "logging", "checkpoint", "between epochs")))
    slower = 1 - facts.of_step("full_s") - known if facts["full_s"] else 0.0
    return max(facts.of_step("allocation_s", of="full_s"), slower)


def _throttled(facts: Facts) -> float:
    gpu = facts.get("gpu") or {}
    reasons = [reason for reason in gpu.get("slowed_by") or () if reason != "power limit"]
    most = gpu.get("max_clock_mhz") or 0.0
    return max(0.05, 1 - (gpu.get("clock_mhz") or 0.0) / most) if reasons and most else 0.0


def _log_less(facts: Facts) -> Fix:
    if facts.get("is_logging") and 0 < facts["log_every"] < 50:
        return Fix(text="trainer:\n  log_every_n_steps: 50", options=["--trainer.log_every_n_steps=50"])
    return Fix(
        text="# Log fewer values in training_step, print less, and refresh the progress bar every 20 steps:\n"
        "trainer:\n  callbacks+:\n    - class_path: LeanProgressBar\n      init_args: {refresh_rate: 20}"
    )


def _save_less(facts: Facts) -> Fix:
    if not facts["save_every"]:
        return Fix(text="# Save less often (ModelCheckpoint: every_n_train_steps, save_on_train_epoch_end).")
    every = int(facts["save_every"] * max(2, round(facts["checkpoint_share"] / 0.01)))
    args = f"every_n_train_steps: {every}"
    return Fix(
        text=f"# in trainer.callbacks\n- class_path: ModelCheckpoint\n  init_args: {{{args}}}",
        options=[f"--trainer.callbacks.ModelCheckpoint.every_n_train_steps={every}"],
    )


def _larger_batch(facts: Facts) -> Fix:
    size = 2 * int(facts["batch_size"])
    options = _data_options(facts, batch_size=size)
    owner = options[0].removeprefix("--").partition(".")[0] if options else "data"
    note = "  # the learning rate may have to change too"
    text = f"{owner}:\n  init_args: {{batch_size: {size}}}{note}" if options else f"DataLoader(..., batch_size={size})"
    return Fix(text=text, options=options, loader={} if options else {"batch_size": size})


def _where(facts: Facts) -> str:
    place, count = (facts.get("waits") or [("", 0)])[0]
    return f"{place} ({count} times in a step)"


TREE: tuple[Cause, ...] = (
    Cause(name="slow loader", lost=lambda f: f.share("data"), least=0.05, sentence=_loading, fix=_more_workers),
    Cause(
        name="unpinned memory",
        lost=lambda f: f.share("transfer") if f.on_gpu and f.get("is_pinned") is False else 0.0,
        least=0.05,
        sentence=lambda f: (
            f"Copies of batches from memory that is not pinned take {_percent(f.share('transfer'))} of a step"
        ),
        fix=lambda f: _loader_fix(f, pin_memory=True),
    ),
    Cause(
        name="host sync",
        lost=lambda f: _idle(f, waits=True),
        least=0.05,
        sentence=lambda f: (
            f"The GPU is idle {_percent(f.unexplained_idle)} of the time, because the host waits for it at {_where(f)}"
        ),
        fix=lambda f: Fix(text=f"# {_where(f)}: do not read values (.item(), print, if); log tensors instead."),
    ),
    Cause(
        name="tiny batch",
        lost=_fixed_cost,
        least=0.1,
        sentence=lambda f: (
            f"The batch of {int(f['batch_size'])} is too small: {_percent(_fixed_cost(f))} of a step does not depend"
            f" on its size, and twice the batch reaches {f['rate_twice'] / (f['rate_same'] or 1.0):.2f} times the speed"
        ),
        fix=_larger_batch,
        unless=("host sync", "uneven ranks", "recompilations", "allocator thrashing"),
    ),
    Cause(
        name="slow launches",
        lost=lambda f: _idle(f, waits=False),
        least=0.1,
        sentence=lambda f: (
            f"The GPU is idle {_percent(f.unexplained_idle)} of the time, because the host launches kernels too slowly"
        ),
        fix=lambda _: Fix(
            text="trainer:\n  callbacks+:\n    - class_path: Compile", options=["--trainer.callbacks+=Compile"]
        ),
        unless=("tiny batch", "allocator thrashing", "recompilations", "uneven ranks", "slow exchange"),
    ),
    Cause(
        name="slow exchange",
        lost=_slow_exchange,
        least=0.1,
        sentence=lambda f: f"Exchanging gradients takes {_percent(_slow_exchange(f))} of a step",
        fix=lambda f: Fix(
            text=f"trainer:\n  accumulate_grad_batches: {4 * int(f['accumulate'] or 1)}",
            options=[f"--trainer.accumulate_grad_batches={4 * int(f['accumulate'] or 1)}"],
        ),
    ),
    Cause(
        name="uneven ranks",
        lost=lambda f: (f["slowest_s"] - f["others_s"]) / (f["mean_s"] or 1.0),
        least=0.08,
        sentence=lambda f: (
            f"All ranks wait for rank {int(f['slowest_rank'])}: outside of backward and optimizer it takes"
            f" {_ms(f['slowest_s'])} a step, the others {_ms(f['others_s'])}"
        ),
        fix=lambda f: Fix(
            text=f"# Give each rank the same work (sort batches by length), and check the machine of rank"
            f" {int(f['slowest_rank'])}: clocks, disk, other load."
        ),
    ),
    Cause(
        name="recompilations",
        lost=lambda f: f["compile_share"],
        least=0.05,
        sentence=lambda f: (
            f"torch.compile compiled {int(f['compilations'])} times in {int(f['steps'])} steps after the warm-up, which"
            f" took {_percent(f['compile_share'])} of the time" + (f": {f['guard']}" if f.get("guard") else "")
        ),
        fix=lambda _: Fix(text="torch.compile(model, dynamic=True)  # or pad batches to a few fixed shapes"),
    ),
    Cause(
        name="fp32 matmuls without TF32",
        lost=lambda f: f.of_step("tf32_saves_s", of="full_s"),
        least=0.05,
        sentence=lambda f: (
            f"Float32 matrix products do not use TF32, which would save"
            f" {_percent(f.of_step('tf32_saves_s', of='full_s'))} of a step"
        ),
        fix=lambda _: Fix(text="flags:\n  tf32: true", options=["--flags.tf32=true"]),
    ),
    Cause(
        name="CPU-bound optimizer",
        lost=_optimizer_excess,
        least=0.08,
        sentence=lambda f: (
            f"The step of {f.get('optimizer_class') or 'the optimizer'} takes {_percent(f.share('optimizer'))} of the"
            f" time; a fused AdamW takes {_ms(f['reference_optimizer_s'])} for the same parameters"
        ),
        fix=_optimizer_fix,
    ),
    Cause(
        name="excessive logging",
        lost=lambda f: f.of_host("logging"),
        least=0.05,
        sentence=lambda f: f"Logging and printing take {_percent(f.of_host('logging'))} of the time",
        fix=_log_less,
    ),
    Cause(
        name="checkpoint stalls",
        lost=lambda f: f["checkpoint_share"],
        least=0.05,
        sentence=lambda f: (
            f"Checkpoints take {_percent(f['checkpoint_share'])} of the time"
            + (f": {_ms(f['save_s'])} each" if f["save_s"] else "")
            + (f", every {int(f['save_every'])} steps" if f["save_every"] else "")
        ),
        fix=_save_less,
    ),
    Cause(
        name="allocator thrashing",
        lost=_thrashing,
        least=0.05,
        sentence=lambda f: (
            f"The CUDA allocator asks the driver for memory {f['allocations_per_step']:.1f} times a step"
            f" ({f['retries_per_step']:.1f} retries), which costs {_percent(_thrashing(f))} of a step"
        ),
        fix=lambda _: Fix(
            text="flags:\n  expandable_segments: true  # and remove calls of torch.cuda.empty_cache()",
            options=["--flags.expandable_segments=true"],
        ),
    ),
    Cause(
        name="slow callback",
        lost=lambda f: f.worst_hook[1],
        least=0.05,
        sentence=lambda f: f"{f.worst_hook[0]} takes {_percent(f.worst_hook[1])} of the time",
        fix=lambda f: Fix(text=f"# Do the work of {f.worst_hook[0]} every 50 steps, or remove it."),
        unless=("allocator thrashing",),
    ),
    Cause(
        name="slow ends of epochs",
        lost=lambda f: f.share("between epochs"),
        least=0.1,
        sentence=lambda f: f"{_percent(f.share('between epochs'))} of the time is spent between two epochs",
        fix=lambda f: (
            _loader_fix(f, persistent_workers=True)
            if f["workers"] and not f.get("persistent")
            else Fix(text="# Make epochs longer, and check what runs in on_train_epoch_end.")
        ),
    ),
    Cause(
        name="throttled GPU",
        lost=_throttled,
        least=0.05,
        sentence=lambda f: (
            f"The GPU is slowed by {', '.join((f.get('gpu') or {}).get('slowed_by') or ())}, to"
            f" {(f.get('gpu') or {}).get('clock_mhz', 0):.0f} of {(f.get('gpu') or {}).get('max_clock_mhz', 0):.0f} MHz"
        ),
        fix=lambda _: Fix(text="# Check cooling and power of this machine, or use another one."),
    ),
)
