"""What slows a run down: experiments on the run itself, one sentence, the evidence, and a fix that is tried once."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from argparse import SUPPRESS, ArgumentParser
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, Timer
from rich.console import Console
from rich.table import Table
from typing_extensions import override

from lightning_ups.commands.base_run import check_file, parsed
from lightning_ups.commands.trial import Continued, endless
from lightning_ups.config.layers import items
from lightning_ups.config.merge import kind_of
from lightning_ups.config.output import note
from lightning_ups.config.parser import UpsParser
from lightning_ups.insight.diagnose import Facts, Finding, Probe, findings
from lightning_ups.insight.processes import end_group, exit_on_signals
from lightning_ups.insight.throughput import PHASE_NAMES

Row = dict[str, Any]
_STOPPING = (EarlyStopping, Timer)
_PROBE = "--probe"  # FILE: for the processes that this command starts
_FOLDER = ".diagnose-"
_START_S = 120.0  # for imports, data, compilation and warm-up; longer if more minutes are given
_LIMIT_S = 60.0  # for one experiment; likewise
_DOUBTFUL = 1.25  # times what the share that a cause takes allows to gain
_PHASE_NAMES = PHASE_NAMES | {
    "logging": "logging and printing",
    "checkpoint": "checkpoints",
    "between epochs": "between epochs",
    "other": "the rest of the loop",
}


def own_options(argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the options of `diagnose` itself, and the words that are options of fit."""
    parser = ArgumentParser(
        prog="python -m lightning_ups diagnose",
        description=__doc__,
        allow_abbrev=False,
        epilog="All options of fit are taken as well, such as --config run.yaml. Files of Lightning and of this package"
        " go to a folder that is removed.",
    )
    parser.add_argument(
        "--minutes", type=float, default=5.0, help="how long it may take from the first measured step; 5"
    )
    parser.add_argument("--json", metavar="FILE", help="also write all facts and findings to this file")
    parser.add_argument("--no_fix", dest="fix", action="store_false", help="do not try the fix")
    parser.add_argument(_PROBE, help=SUPPRESS)
    return parsed(parser, argv)


def main(argv: Sequence[str]) -> int | None:
    """Diagnose the run that `argv` describes. Return None in a process that runs the experiments."""
    own, rest = own_options(argv)
    if own["probe"]:
        return None
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and "LOCAL_RANK" in os.environ:
        raise ValueError("diagnose starts the processes of a run itself. Start it once, without torchrun or srun.")
    if own["json"]:
        check_file(Path(own["json"]), option="--json")
    diagnosis = _Diagnosis(rest, minutes=own["minutes"])
    with exit_on_signals(), suppress(KeyboardInterrupt):  # what there is so far is shown
        diagnosis.run(tries_fix=own["fix"])
    if not diagnosis.facts.get("shares"):
        raise ValueError(f"No step was measured: {diagnosis.why_nothing}.".replace("?.", "?"))
    diagnosis.show()
    if own["json"]:
        file = Path(own["json"])
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(diagnosis.as_dict(), indent=1, default=str) + "\n")
    return 0


class _Diagnosis:
    """Starts the processes that run the experiments, and collects their rows."""

    def __init__(self, argv: Sequence[str], *, minutes: float) -> None:
        self._argv, self._console = [*argv], Console()
        if not self._console.is_terminal:
            self._console = Console(width=110)
        self._seconds = 60 * minutes
        self._began: float | None = (
            None  # when the first steps were measured: imports and compilation take what they take
        )
        self.facts: dict[str, Any] = {}
        self.errors: dict[str, str] = {}
        self.gain: float | None = None
        self.trials: dict[str, float | str] = {}  # the speed with a change, as a factor; or why there is none
        self.why_nothing = "it was interrupted"

    @property
    def found(self) -> list[Finding]:
        return findings(self.facts)

    @property
    def _left(self) -> float:
        return self._seconds - (time.time() - self._began if self._began is not None else 0.0)

    def run(self, *, tries_fix: bool) -> None:
        """Run all experiments, then the trials of whole runs, then the fix."""
        while True:
            failed = self._child({"skip": [*self.errors, *self.facts.get("done", ())]}, self._collect)
            # A hang or a crash costs one row; the next process leaves that experiment out.
            if failed is None or failed in ("start", "warm-up", "steps") or failed in self.errors:
                break
            self.errors[failed] = "crashed or took too long"
            if self._left < 30:
                break
        if not self.facts.get("shares"):
            return
        first = next(iter(self.found), None)
        if tries_fix and first is not None and first.fix.can_be_tried and self._left > 5:
            fix = {"loader": first.fix.loader, "optimizer": first.fix.optimizer}
            speed = self._try(f"fix: {first.name}", first.fix.options, fix)
            # Before and after the fix, since other load on the machine changes.
            again = self._try("the same run again", []) if isinstance(speed, float) and self._left > 5 else 1.0
            if isinstance(speed, float) and isinstance(again, float):
                self.gain = speed / ((1 + again) / 2)
        if self.facts["world_size"] > 1 and self._left > 60:
            speed = self._try("1 device", ["--trainer.devices=1"])
            if isinstance(speed, float):
                self.facts["scaling"] = 1 / speed
        if self._left > 120 and self.facts["is_compiled"]:
            self._try("eager", [], {"environment": {"TORCH_COMPILE_DISABLE": "1"}})
        elif self._left > 120:
            self._try("compiled", ["--trainer.callbacks+=Compile"])

    def _try(self, name: str, options: Sequence[str], changes: Mapping[str, Any] | None = None) -> float | str:
        """Return the speed of the run with ``options``, as a factor of the speed without."""
        rows: list[Row] = []
        spec = {"only_steps": True, **(changes or {})}
        failed = self._child(spec, rows.append, options=options, title=name)
        facts = next((row["facts"] for row in rows if row.get("end") == "steps" and "facts" in row), None)
        if facts is None:
            self.trials[name] = f"failed: {self.why_nothing}" if failed else "no step was measured"
        else:
            rows_before, rows_now = self.facts.get("batch_rows") or 1, facts.get("batch_rows") or 1
            self.trials[name] = (rows_now / facts["mean_s"]) / (rows_before / self.facts["mean_s"])
            self._console.print(f"{name}: {self.trials[name]:.2f} times the speed", highlight=False)
        return self.trials[name]

    def _collect(self, row: Row) -> None:
        name = row.get("end")
        if name is None:
            return
        if "error" in row:
            self.errors[name] = row["error"]
            self.why_nothing = row["error"]
        elif name != "all":
            self.facts |= row["facts"]
            self.facts["done"] = [*self.facts.get("done", ()), name]
        if name != "all":
            self._console.print(f"{name}: {row.get('error') or 'done'}", highlight=False)

    def _child(
        self, spec: Row, collect: Callable[[Row], None], *, options: Sequence[str] = (), title: str = "experiments"
    ) -> str | None:
        """Run fit with a `Probe` in a process group of its own. Return the experiment that did not end, or None."""
        folder = Path(tempfile.mkdtemp(prefix="diagnose-"))
        rows, token = folder / "rows.jsonl", folder.name.removeprefix("diagnose-")
        seconds = min(20.0, max(1.0, self._seconds / 15))
        spec = {
            "seconds": seconds,
            "within": self._left - self._seconds / 3,
            "rows": str(rows),
            "token": token,
            **spec,
        }
        command = [sys.executable, "-m", "lightning_ups", "diagnose", _PROBE, str(folder / "spec.json")]
        roots: set[str] = set()
        environment = {**os.environ, **spec.pop("environment", {})}
        (folder / "spec.json").write_text(json.dumps(spec))
        current, since = "start", time.time()
        with (folder / "output.txt").open("w") as output, self._console.status(f"{title}: starting") as status:
            child = subprocess.Popen(
                [*command, *self._argv, *options], stdout=output, stderr=output, env=environment, start_new_session=True
            )
            try:
                for row in _follow(rows, child):
                    if row is None:
                        is_starting = current in ("start", "warm-up")
                        limit = max(_START_S if is_starting else _LIMIT_S, self._seconds / (3 if is_starting else 6))
                        if time.time() - since > limit:
                            self.why_nothing = f"{current} took more than {limit:.0f} s"
                            break
                        continue
                    if "root" in row:
                        roots.add(row["root"])
                        continue
                    current, since = row.get("start") or "between", time.time()
                    if current == "steps" and self._began is None:
                        self._began = since
                    status.update(f"{title}: {current}")
                    collect(row)
                    if row.get("end") == "all":
                        return None
            finally:
                end_group(child)
                text = (folder / "output.txt").read_text(errors="replace")
                if current in ("start", "warm-up") and child.returncode not in (0, -signal.SIGKILL):
                    self.why_nothing = _last_lines(text)
                for root in roots:
                    shutil.rmtree(root, ignore_errors=True)
                shutil.rmtree(folder, ignore_errors=True)
        return current

    # The report

    def show(self) -> None:
        """Print the sentence, the evidence and the fix."""
        print_ = partial(self._console.print, highlight=False, markup=False, soft_wrap=True)
        found = self.found
        print_()
        print_(f"{found[0].sentence}." if found else "Nothing stands out: no finding reaches its threshold.")
        print_()
        self._console.print(_table("of a step", self._shares()))
        self._console.print(_table("experiment", [*_evidence(self.facts), *self._other_rows()]))
        for other in found[1:]:
            print_(f"Also: {other.sentence}.")
        if found:
            print_(f"\nFix for {found[0].name} ({self._gain_as_text(found[0])}):\n\n{found[0].fix.text}\n")

    def _gain_as_text(self, first: Finding) -> str:
        if self.gain is not None:
            more = (
                "" if self.gain * (1 - first.lost) < _DOUBTFUL else ", more than it explains: the machine may be shared"
            )
            return f"tried once: {self.gain:.2f} times the mean speed of the runs without it{more}"
        tried = self.trials.get(f"fix: {first.name}")
        if isinstance(tried, str):
            return f"gain not measured: {tried}"
        return "not tried" if tried is None else "gain not known: the run without it was not measured again"

    def as_dict(self) -> dict[str, Any]:
        """Return everything for ``--json``."""
        keys = ("name", "lost", "sentence")
        listed = [{key: getattr(each, key) for key in keys} | {"fix": each.fix.text} for each in self.found]
        shown = {key: value for key, value in self.facts.items() if key not in ("data_settings", "model_settings")}
        return {
            "schema": 1,
            "sentence": listed[0]["sentence"] if listed else "nothing stands out",
            "findings": listed,
            "gain": self.gain,
            "trials": self.trials,
            "facts": shown,
            "errors": self.errors,
        }

    def _shares(self) -> Iterator[tuple[str, str]]:
        mean_s = self.facts["mean_s"]
        shares = {_PHASE_NAMES[name]: share for name, share in self.facts["shares"].items() if name in _PHASE_NAMES}
        shares |= {name: share for name, share in (self.facts.get("hooks") or {}).items() if share >= 0.01}
        for name, share in sorted(shares.items(), key=lambda each: -each[1]):
            yield name, f"{share:6.1%}  {_seconds(share * mean_s)}"
        yield "a step, on average", f"        {_seconds(mean_s)}"

    def _other_rows(self) -> Iterator[tuple[str, str]]:
        for name, speed in self.trials.items():
            yield name, f"{speed:.2f} times the speed" if isinstance(speed, float) else str(speed)
        if "scaling" in self.facts:
            yield f"{self.facts['world_size']} devices", f"{self.facts['scaling']:.2f} times the speed of 1 each"
        yield from self.errors.items()


def _table(title: str, rows: Any) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(title, min_width=24)
    table.add_column("")
    for row in rows:
        table.add_row(*row)
    return table


def _evidence(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    f = Facts(facts)
    for name, key in (("forward only", "forward_s"), ("forward and backward", "backward_s"), ("full step", "full_s")):
        if f[key]:
            yield f"{name}, batch on the device", _seconds(f[key])
    if f["loader_rate"]:
        yield "the loader alone", f"{f['loader_rate']:,.0f} samples/s"
    if f["device_rate"]:
        yield "the step without it", f"{f['device_rate']:,.0f} samples/s"
    if f["rate_same"]:
        half, twice = (f[f"rate_{name}"] / f["rate_same"] for name in ("half", "twice"))
        yield "half and twice the batch", f"{half:.2f} and {twice:.2f} times the speed"
    if f["reference_optimizer_s"]:
        yield "a fused AdamW instead", _seconds(f["reference_optimizer_s"])
    if f["silent_s"]:
        yield "without the exchange", f"{_seconds(f['silent_s'])} of {_seconds(f['exchange_s'])}"
    if f["slowest_s"]:
        own = f"rank {f['slowest_rank']}: {_seconds(f['slowest_s'])}, others {_seconds(f['others_s'])}"
        yield "own work of a step", own
    if f["compilations"]:
        yield "compiled after warm-up", f"{int(f['compilations'])} times, {f['compile_share']:.0%} of the time"
    if f.on_gpu:
        yield from _gpu_rows(f)
    for name, rate in (f.get("bandwidth") or {}).items():
        yield "memory" if name == "memory" else f"host to device, {name}", f"{rate / 1e9:,.1f} GB/s"
    for each in f.get("collectives") or ():
        rate = f"{_seconds(each['seconds'])}, {each['bus_bytes_per_s'] / 1e9:.2f} GB/s"
        yield f"{each['what']} of {each['bytes'] / 1024:,.0f} KiB", rate
    for each in f.get("operators") or ():
        roof = f", {each['of_peak']:.0%} of the {each['bound']} roof" if "bound" in each else ""
        yield each["name"][:48], f"{each['share']:.0%} of the work, {each['count']}x{roof}"


def _gpu_rows(f: Facts) -> Iterator[tuple[str, str]]:
    if f["idle"]:
        yield "idle", f"{f['idle']:.0%}"
    for place, count in (f.get("waits") or ())[:3]:
        yield "the host waits", f"{place}, {count}x"
    yield "GPU memory", f"{f['memory_used']:.0%} used, {f['fragmentation']:.0%} of it fragmented"
    gpu = f.get("gpu") or {}
    if gpu.get("clock_mhz"):
        slowed = f", slowed by {', '.join(gpu['slowed_by'])}" if gpu.get("slowed_by") else ""
        yield "clock and power", f"{gpu['clock_mhz']:.0f} MHz, {gpu.get('power_w') or 0:.0f} W{slowed}"
    if (links := f.get("topology") or {}).get("pairs"):
        yield "pairs of GPUs", f"{links['direct_pairs']} of {links['pairs']} reach each other directly"


def _seconds(value: float) -> str:
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"


def _follow(path: Path, child: "subprocess.Popen[Any]") -> Iterator[Row | None]:
    """Yield the rows that ``child`` writes, and None every tenth of a second, until it ends."""
    position = 0
    while True:
        is_over = child.poll() is not None
        if path.exists():
            with path.open() as file:
                file.seek(position)
                while (line := file.readline()).endswith("\n"):
                    position = file.tell()
                    yield json.loads(line)
        if is_over:
            return
        yield None
        time.sleep(0.1)


def _last_lines(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error:")]
    errors = errors or [line for line in lines if "Error" in line.partition(":")[0]]
    return (errors or lines or ["the process ended without a message"])[-1].removeprefix("error: ").rstrip(".")


# In the process that runs the experiments


def fit_options(*, probe: str, **_: Any) -> dict[str, Any]:
    """Return the arguments of UpsCLI for a fit with a `Probe` that leaves no files."""
    spec = json.loads(Path(probe).read_text())
    rows, token = Path(spec.pop("rows")), spec.pop("token")

    def report(row: Row) -> None:
        with rows.open("a") as file:
            file.write(json.dumps(row, default=str) + "\n")

    class Redirected(UpsParser):
        """Let everything that the run writes go to a folder that is removed."""

        @override
        def instantiate_classes(self, cfg: Any, *args: Any, **options: Any) -> Any:
            if isinstance(settings := cfg.get("fit"), Namespace):
                folder = _folder(settings.get("trainer.default_root_dir"), token)
                report({"root": str(folder)})
                _redirect(settings, folder)
            return super().instantiate_classes(cfg, *args, **options)

    callbacks = [_OfTheModule(), Continued(), Probe(report, **spec, done=_leave)]
    return {"parser_class": Redirected, "save_config_callback": None, "trainer_defaults": {"callbacks": callbacks}}


def _folder(root: Any, token: str) -> Path:
    """Return a folder on the disk of the run, so that checkpoints cost what they cost there."""
    wanted = Path(os.path.expandvars(str(root or "."))).expanduser().absolute()
    place = next((each for each in (wanted, *wanted.parents) if each.is_dir()), Path(tempfile.gettempdir()))
    if not os.access(place, os.W_OK):
        place = Path(tempfile.gettempdir())
    folder = place / f"{_FOLDER}{token}"
    folder.mkdir(exist_ok=True)
    return folder


def _redirect(settings: Namespace, folder: Path) -> None:
    settings["ckpt_path"] = None
    for slot in ("manifest", "throughput"):
        settings[f"{slot}.enabled"] = False  # they write files, and measure what is measured here
    validation = settings["trainer.limit_val_batches"]
    trainer = {
        "default_root_dir": str(folder),
        "num_nodes": 1,
        "min_epochs": None,
        "min_steps": None,
        "max_time": None,
        "num_sanity_val_steps": 0,
        "fast_dev_run": False,
        "profiler": None,
        "limit_val_batches": 0 if validation in (0, 0.0) else 1,
    }
    callbacks = items(settings["trainer.callbacks"])
    stopping = [each for each in callbacks if issubclass(_kind(each), _STOPPING)]
    if stopping:  # they would end the run before everything is measured
        trainer["callbacks"] = [each for each in callbacks if each not in stopping]
    if endless(settings["trainer"], has_timer=any(issubclass(_kind(each), Timer) for each in stopping)):
        trainer["max_epochs"] = -1
    for name, value in trainer.items():
        settings[f"trainer.{name}"] = value
    loggers = settings["trainer.logger"]
    if not isinstance(loggers, bool) and loggers is not None:
        settings["trainer.logger"] = [each for each in items(loggers) if _redirected_logger(each, folder)] or False
    for callback in items(settings["trainer.callbacks"]):
        if isinstance(callback, Namespace) and callback.get("init_args.dirpath") is not None:
            callback["init_args.dirpath"] = str(folder / "checkpoints")


class _OfTheModule(Callback):
    """Treats the callbacks of the module's ``configure_callbacks`` as those of the configuration."""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        kept = [each for each in trainer.callbacks if not isinstance(each, _STOPPING)]  # type: ignore[attr-defined]
        trainer.callbacks = kept  # type: ignore[attr-defined]
        for callback in trainer.checkpoint_callbacks:
            if getattr(callback, "dirpath", None) is not None:
                callback.dirpath = str(Path(trainer.default_root_dir, "checkpoints"))  # type: ignore[attr-defined]


def _kind(callback: Any) -> type:
    return (kind_of(callback.get("class_path")) if isinstance(callback, Namespace) else None) or object


def _redirected_logger(logger: Any, folder: Path) -> bool:
    name = str(logger.get("class_path", "")).rpartition(".")[2] if isinstance(logger, Namespace) else ""
    if name not in ("TensorBoardLogger", "CSVLogger", "WandbLogger"):
        note(f"diagnose leaves out the logger {name or logger!r}: it may write to a server.")
        return False
    logger["init_args.save_dir"] = str(folder)
    if name == "WandbLogger":
        logger["init_args.offline"] = True
        logger["init_args.log_model"] = False
    return True


def _leave(trainer: Trainer) -> None:
    """End this process at once: closing loaders, loggers and ranks may take long, and nothing of it is needed."""
    trainer.strategy.barrier()
    sys.stdout.flush()
    os._exit(0)
