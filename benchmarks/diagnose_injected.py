"""Which problem does `diagnose` name first in runs with one injected problem each, and in healthy ones?

    python benchmarks/diagnose_injected.py --output FOLDER                                 # all GPUs of the machine
    python benchmarks/diagnose_injected.py --only slow_loader healthy_vision --output FOLDER

Twelve runs have one problem each that costs about 15 % of a step, three are healthy: a GPT, a ResNet-50 and an MLP for
a PDE. A case with a problem first measures the healthy step, then sets the amount of its fault until the step with it
takes 1 / 0.85 of that. `diagnose` then gets the configuration in FOLDER/CASE/run.yaml, as a user would start it, and
writes FOLDER/CASE/found.json, which has all evidence. A line of FOLDER/results.jsonl has the fault, its measured share,
what `diagnose` named first, and its sentence; FOLDER/table.md has the table, after each case. Called again with the
same folder, the script makes the cases that are missing; with --budget 1 it only prints the table.

Several cases are under way on a GPU (--lanes), since most of their time is that of imports: one at a time has the GPU,
the others wait for it. With several GPUs, cases also run at the same time. Each has its share of the cores. Cases of
two ranks need two GPUs. On a CPU the models are small and faults that need a GPU are left out.
"""

import argparse
import json
import math
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from cases import add_to, keep, prepare
from injected import TURNS, take_turn
from processes import ROOT, finished, result_of, told_to_end
from side_by_side import Run, SideBySide, visible_as
from typing_extensions import override

TARGET, TOLERANCE = 0.15, 0.02  # of a step: what a fault is to cost, and how near is near enough
TRIALS = 5  # of the amount of a fault, at most
CUDA = torch.cuda.is_available()
RESULTS = "results.jsonl"
START_S = 60  # of a process: imports, and the end
LEAST_S = 70  # that must be left for a case to begin


@dataclass(frozen=True)
class Case:
    """A run with one problem, or with none.

    Args:
        kind: The model and its data.
        named: What `diagnose` calls the problem; "" for a healthy run.
        amount: Where the search for the amount of the fault begins.
        least: The least change of the amount that matters.
        most: The largest amount.
        same_base: Whether the healthy step does not depend on the amount.
        ranks: Devices of the run.
        on_cpu: Whether the fault is one without a GPU.
    """

    kind: str
    named: str = ""
    amount: float = 0.0
    least: float = 1.0
    most: float = math.inf
    same_base: bool = True
    ranks: int = 1
    on_cpu: bool = False


CASES: Mapping[str, Case] = {
    "throttled_exchange": Case("language", "slow exchange", 8, least=0.1, ranks=2),
    "uneven_ranks": Case("language", "uneven ranks", 90, most=512, ranks=2),
    "healthy_language": Case("language", on_cpu=True),
    "healthy_vision": Case("vision", on_cpu=True),
    "healthy_physics": Case("physics", on_cpu=True),
    "excessive_logging": Case("language", "excessive logging", 200 if CUDA else 50, on_cpu=True),
    "no_tf32": Case("language", "fp32 matmuls without TF32", 32, same_base=False),
    "checkpoint_stalls": Case("vision", "checkpoint stalls", 3 if CUDA else 5, least=0.01, most=100, on_cpu=True),
    "slow_optimizer": Case("physics", "CPU-bound optimizer", 180 if CUDA else 100, same_base=False, on_cpu=True),
    "allocator_thrashing": Case("physics", "allocator thrashing", 10, least=0.1),
    "host_sync": Case("language", "host sync", 500),
    "recompilations": Case("physics", "recompilations", 2.5, least=0.01, most=100),
    "unpinned_memory": Case("vision", "unpinned memory", 60, same_base=False),
    "slow_loader": Case("vision", "slow loader", 20 if CUDA else 60, on_cpu=True),
    "tiny_batch": Case("physics", "tiny batch", 3, least=0.1, most=63),
}
# The amount of these is how many of a hundred steps have the problem.
PERIODIC = ("recompilations", "checkpoint_stalls")


def config_of(name: str, amount: float, *, active: bool) -> dict[str, Any]:
    """Return the configuration of a case as YAML has it."""
    case = CASES[name]
    fault: dict[str, Any] = {"fault": name, "amount": amount, "active": active} if case.named else {}
    trainer: dict[str, Any] = {
        "accelerator": "gpu" if CUDA else "cpu",
        "devices": case.ranks,
        "max_epochs": -1,
        "max_steps": 1_000_000,
        "limit_val_batches": 0,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 50,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "default_root_dir": "runs",
        "logger": {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "runs"}},
    }
    if case.ranks > 1:
        trainer["strategy"] = "ddp"
    if CUDA and case.kind != "physics":
        trainer["precision"] = "bf16-mixed"
    if case.kind == "vision":
        trainer["benchmark"] = True
    if active and name == "excessive_logging":
        trainer["log_every_n_steps"] = 1
    if active and name == "checkpoint_stalls":
        saves = {"dirpath": "runs/checkpoints", "every_n_train_steps": period(amount)}
        trainer["enable_checkpointing"] = True
        trainer["callbacks"] = [{"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": saves}]
    return {
        "seed_everything": 0,
        "model": {"class_path": f"injected.{case.kind.capitalize()}", "init_args": fault},
        "data": {"class_path": "injected.Data", "init_args": {"kind": case.kind, **fault}},
        "trainer": trainer,
    }


def period(amount: float) -> int:
    """Return every how many steps a periodic fault comes."""
    return max(1, round(100 / amount))


def found_amount(
    cost: Callable[[float], float], case: Case, *, is_late: Callable[[], bool] = lambda: False
) -> tuple[float, float]:
    """Return the amount of a fault at which ``cost``, its share of a step, is nearest to TARGET, and that share.

    The search ends early when ``is_late``.
    """
    wanted = _extra(TARGET)
    points = [(0.0, 0.0)]  # amounts, and what they add to a healthy step, by amount
    amount = case.amount
    best = (amount, math.inf)
    for _ in range(TRIALS):
        share = cost(amount)
        if abs(share - TARGET) < abs(best[1] - TARGET):
            best = (amount, share)
        if abs(share - TARGET) <= TOLERANCE or is_late():
            break
        points = sorted([*points, (amount, _extra(share))])
        below = max((point for point in points if point[1] < wanted), default=(0.0, 0.0))
        above = min((point for point in points if point[1] >= wanted and point[0] > below[0]), default=None)
        if above is not None:
            following = _between(below, above, wanted)
        else:
            following = below[0] * min(8.0, max(1.5, wanted / max(below[1], 0.01)))
        following = min(case.most, max(case.least, round(following / case.least) * case.least))
        if any(abs(following - known) < case.least / 2 for known, _ in points):
            break
        amount = round(following, 6)
    return best


def _between(below: tuple[float, float], above: tuple[float, float], wanted: float) -> float:
    """Return the amount between two at which ``wanted`` is expected, whether the cost is a power or begins late."""
    (low, little), (high, much) = below, above
    if little > 0.01:
        return low * (high / low) ** (math.log(wanted / little) / math.log(much / little))
    linear = low + (wanted - little) / (much - little) * (high - low)
    return max(linear, math.sqrt(low * high))


def _extra(share: float) -> float:
    """Return what a share of a step adds to the step without it."""
    return share / (1 - share)


# A child measures, with the same command line code that the run has


class Calibration:
    """Measures steps of a case; every rank of it does the same."""

    def __init__(self, name: str, *, seconds: float) -> None:
        self._name, self._case, self._seconds = name, CASES[name], seconds
        self._base: float | None = None
        self._warm = 30 if CUDA else 8  # steps before those that are measured; more in the first run
        self.measured: list[dict[str, Any]] = []

    def step_s(self, amount: float, *, active: bool) -> float:
        """Return the seconds of a step; of one with the healthy batch size, where the fault is a small batch."""
        import injected
        from lightning.pytorch import Callback, LightningModule, Trainer

        from lightning_ups.cli import UpsCLI

        every = period(amount) if active and self._name in PERIODIC else 1
        seconds, warm_up = self._seconds, self._warm
        self._warm = 15 if CUDA else 4

        class Clock(Callback):
            warm, steps, began, taken = warm_up, 0, 0.0, 0.0

            @override
            def on_train_batch_start(
                self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
            ) -> None:
                step = trainer.global_step
                if step == self.warm // 2:
                    self.began = _now()
                if step == self.warm:
                    one = (_now() - self.began) / (self.warm - self.warm // 2)
                    # A whole number of periods, two at least.
                    steps = max(2, math.ceil(seconds / one / every)) * every if every > 1 else seconds / one
                    self.steps = trainer.strategy.broadcast(max(4, math.ceil(steps)))
                    self.began = _now()
                if self.steps and step == self.warm + self.steps:
                    self.taken = (_now() - self.began) / self.steps
                    trainer.should_stop = True

        clock = Clock()

        class Timed(UpsCLI):
            @override
            def after_instantiate_classes(self) -> None:
                self.trainer.callbacks.append(clock)  # type: ignore[attr-defined]

        with tempfile.TemporaryDirectory() as folder:
            config = config_of(self._name, amount, active=active)
            path = Path(folder) / "run.yaml"
            path.write_text(yaml.safe_dump(config))
            # Its profiler would run within the measured steps.
            Timed(args=["fit", "--config", str(path), "--throughput.enabled=false", "--manifest.enabled=false"])
            assert clock.taken, "the run ended before it was measured"
        taken = clock.taken
        if active and self._name == "tiny_batch":
            kind = self._case.kind
            taken *= injected.BATCH[kind] / injected.batch_size(kind, self._name, amount)
        if CUDA:
            torch.cuda.empty_cache()
        return _of_rank_0(taken)

    def cost(self, amount: float) -> float:
        """Return the share of a step that the fault costs."""
        if self._base is None or not self._case.same_base:
            self._base = self.step_s(amount, active=False)
        taken = self.step_s(amount, active=True)
        share = 1 - self._base / taken
        self.measured.append(
            {"amount": amount, "healthy_ms": self._base * 1e3, "injected_ms": taken * 1e3, "share": share}
        )
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"{self._name}: {json.dumps(self.measured[-1])}", flush=True)
        return share


def _now() -> float:
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


def _of_rank_0(value: Any) -> Any:
    if not torch.distributed.is_initialized():
        return value
    values = [value]
    torch.distributed.broadcast_object_list(values, src=0)
    return values[0]


def calibrate(name: str, *, seconds: float, limit: float) -> dict[str, Any]:
    """Return the amount of the fault of a case, and what was measured with it, in ``limit`` seconds at most."""
    case, calibration = CASES[name], Calibration(name, seconds=seconds)
    take_turn()
    late = time.monotonic() + 0.7 * limit  # a trial may still follow
    amount, share = found_amount(calibration.cost, case, is_late=lambda: _of_rank_0(time.monotonic() > late))
    chosen = next(one for one in calibration.measured if one["amount"] == amount)
    return {**chosen, "share": share, "tried": calibration.measured}


# One case: calibrate, then diagnose


def _environment() -> dict[str, str]:
    paths = [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def calibrated(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return what `calibrate` found, in a process of its own, now or in an earlier call."""
    kept = options.output / name / "calibration.json"
    if kept.exists():
        return json.loads(kept.read_text())
    words = [sys.executable, str(Path(__file__).resolve()), "--calibrate", name, "--seconds", str(options.seconds)]
    words += ["--calibration", str(options.calibration), "--output", str(options.output)]
    printed = finished(words, timeout=_limit(options), environment=_environment())
    add_to(options.output / name / "calibration.txt", printed)
    found = result_of(printed)
    if "error" not in found:
        print(f"{name}: the amount {found['amount']:g} costs {found['share']:.1%} of a step", flush=True)
        keep(kept, found)
    return found


def _limit(options: argparse.Namespace) -> float:
    """Return the seconds of a process, which waits for those of other cases."""
    return START_S + options.lanes * (options.calibration + 60 * options.minutes)


def case_of(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Calibrate a case, run `diagnose` on it, and return what came out."""
    began, folder = time.monotonic(), options.output / name
    folder.mkdir(parents=True, exist_ok=True)
    found = calibrated(name, options) if CASES[name].named else {"amount": 0.0, "share": 0.0}
    if "error" in found:
        return {"case": name, "failed": "calibration", **found}
    config = config_of(name, found["amount"], active=True)
    (folder / "run.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    command = ["diagnose", "--config", "run.yaml", "--minutes", str(options.minutes), "--json", "found.json"]
    command = [*command, *([] if options.fix else ["--no_fix"])]
    (folder / "found.json").unlink(missing_ok=True)
    between = time.monotonic()
    inside = [
        "bash",
        "-c",
        f"cd {shlex.quote(str(folder))} && exec {shlex.join([sys.executable, '-m', 'lightning_ups', *command])}",
    ]
    printed = finished(inside, timeout=_limit(options), environment=_environment())
    add_to(folder / "diagnose.txt", printed)
    shutil.rmtree(folder / "runs", ignore_errors=True)
    common = {
        "case": name,
        "expected": CASES[name].named or "nothing",
        **found,
        "command": shlex.join(["python", "-m", "lightning_ups", *command]),
        "output": f"{name}/found.json",
        "device": torch.cuda.get_device_name() if CUDA else "cpu",
        "calibration_s": round(between - began, 1),
        "diagnose_s": round(time.monotonic() - between, 1),
    }
    if not (folder / "found.json").exists():
        return {**common, "failed": "diagnose", "error": printed.strip()[-1500:]}
    return {**common, **verdict(name, json.loads((folder / "found.json").read_text()))}


def verdict(name: str, diagnosis: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `diagnose` named first, and whether that is the problem of the case."""
    names = [finding["name"] for finding in diagnosis["findings"]]
    first = names[0] if names else "nothing"
    return {
        "named": first,
        "named_lost": diagnosis["findings"][0]["lost"] if names else 0.0,
        "also_named": names[1:],
        "sentence": diagnosis["sentence"],
        "errors": diagnosis.get("errors", {}),
        "correct": first == (CASES[name].named or "nothing"),
    }


def known(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the last result of each case."""
    path = folder / RESULTS
    lines = path.read_text().splitlines() if path.exists() else []
    return {result["case"]: result for result in map(json.loads, filter(None, lines))}


# All cases


def runs_of(names: Sequence[str], *, share: int, words: Sequence[str], seconds: float) -> list[Run]:
    """Return the runs of cases, those of two ranks first, each on the GPUs with the fewest runs so far."""
    busy = dict.fromkeys(range(share), 0)
    runs = list[Run]()
    for name in sorted(names, key=lambda name: -CASES[name].ranks):
        ranks = CASES[name].ranks
        groups = [tuple(range(first, first + ranks)) for first in range(0, max(1, share - ranks + 1), ranks)]
        gpus = min(groups, key=lambda group: max(busy.get(gpu, 0) for gpu in group))
        busy |= {gpu: busy.get(gpu, 0) + 1 for gpu in gpus}
        runs.append(Run(frozenset(gpus), seconds, name, shlex.join([*words, "--case", name]), least=LEAST_S))
    return runs


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the results as a table."""
    rows = [("case", "share", "named first", "", "sentence"), ("---",) * 5]
    for name in CASES:
        if (result := results.get(name)) is None:
            continue
        said = result.get("sentence", " ".join(str(result.get("error", "")).split())[-80:])
        named = result.get("named", f"{result.get('failed')} failed")
        correct = "correct" if result.get("correct") else f"expected {result.get('expected', CASES[name].named)}"
        rows.append((name, f"{result.get('share', 0):.1%}", named, correct, said))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def parsed(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", choices=[*CASES], metavar="NAME", help=f"of {', '.join(CASES)}")
    parser.add_argument("--devices", type=int, help="GPUs to use; all")
    parser.add_argument("--lanes", type=int, default=3 if CUDA else 1, help="cases under way for each GPU; 3")
    parser.add_argument(
        "--budget", type=float, default=540, help="seconds for everything; 540; later cases are left out"
    )
    parser.add_argument("--minutes", type=float, default=0.8, help="of each diagnose; 0.8")
    parser.add_argument("--fix", action="store_true", help="let diagnose try its fix, which takes longer")
    parser.add_argument("--seconds", type=float, default=1, help="how long each trial of an amount measures")
    parser.add_argument("--calibration", type=float, default=40, help="seconds of the calibration of a case; 40")
    parser.add_argument("--output", type=Path, required=True, help="where everything is kept")
    parser.add_argument("--case", choices=[*CASES], help=argparse.SUPPRESS)
    parser.add_argument("--calibrate", choices=[*CASES], help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if not (options.case or options.calibrate):
        prepare(parser, options.output)
    options.output = options.output.resolve()
    return options


def _unmet(case: Case, devices: int) -> str:
    if not CUDA:
        return "" if case.on_cpu else "a GPU"
    return f"{case.ranks} GPUs" if case.ranks > devices else ""


def main() -> int:
    """Make the cases that were asked for and have no result yet; return 0 if `diagnose` was right in all of them."""
    options = parsed()
    if options.calibrate:
        os.chdir(options.output / options.calibrate)
        found = calibrate(options.calibrate, seconds=options.seconds, limit=options.calibration)
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print("\nRESULT " + json.dumps(found), flush=True)
            os._exit(0)  # the next case waits for the GPU
        return 0
    if options.case:
        result = case_of(options.case, options)
        add_to(options.output / RESULTS, json.dumps(result) + "\n")
        (options.output / "table.md").write_text(table(known(options.output)) + "\n")
        print(json.dumps(result), flush=True)
        return int("failed" in result)
    wanted = options.only or [*CASES]
    present = torch.cuda.device_count() or 1
    devices = min(options.devices or present, present)
    for name in wanted:
        if unmet := _unmet(CASES[name], devices):
            print(f"{name}: left out, it needs {unmet}")
    wanted = [name for name in wanted if not _unmet(CASES[name], devices)]
    done = [name for name, result in known(options.output).items() if "failed" not in result]
    words = [sys.executable, str(Path(__file__).resolve())]
    for name in ("minutes", "seconds", "calibration", "lanes", "output"):
        words += [f"--{name}", str(getattr(options, name))]
    words += ["--fix"] * options.fix
    # Each lane is a GPU for what starts the cases; the cases of one GPU take turns.
    share = devices * options.lanes
    os.environ[TURNS] = str(options.output)
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(
        visible_as(gpu) for _ in range(options.lanes) for gpu in range(devices)
    )
    longest = 2 * _limit(options)
    runs = runs_of([n for n in wanted if n not in done], share=share, words=words, seconds=longest)
    with told_to_end():
        SideBySide(options.output, limit=options.budget, gpus=share).all_of(runs)
    results = known(options.output)
    print(table(results))
    asked = [results[name] for name in wanted if name in results]
    right = sum(bool(result.get("correct")) for result in asked)
    print(f"{right} of {len(asked)} correct")
    if left := [name for name in wanted if name not in results or "failed" in results[name]]:
        print(f"left: {' '.join(left)}")
    return int(bool(left) or right < len(asked))


if __name__ == "__main__":
    sys.exit(main())
