"""Does a run survive SIGKILL while it saves a checkpoint in the background, and a disk that is full?

A training run of one or two gloo ranks under FSDP2Strategy saves in the background: every second step a rolling
checkpoint (the older one is deleted), and every third ``last.ckpt`` (written over). It is killed in a given phase of a
save and started again by the same command, with ``ckpt_path="last"``; and so on, one life after the other. After each
death:

- everything that is not whole is refused;
- the next life resumes from the newest whole ``last.ckpt``, or, if there is none yet, from the newest whole checkpoint;
- each loss of a step that an earlier life had made must be the same, bit for bit;
- at its first save the next life deletes what was left half written; whole checkpoints stay.

At the end one run that nothing interrupts makes all steps, and its losses must be those of the many lives. Then the
same on a file system that is too small for the second checkpoint.

    python benchmarks/checkpoint_kills.py --output benchmarks/results/DATE_checkpoint_kills
    python benchmarks/checkpoint_kills.py --ranks 1 --random 20 --no-full-disk --output benchmarks/results/DATE_one_rank
    python benchmarks/checkpoint_kills.py --signal INT --compile --random 10 --no-full-disk --output DIR

With ``--signal TERM`` or ``INT`` all ranks get that signal instead, at random moments from the first batch on, and must
end by themselves with the exit code that belongs to it.
"""

import argparse
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

# What kills, how often. A phase is that of the save at the moment of death, as the saving thread wrote it down.
PLAN = (
    ("staging", 3),
    ("writing", 9),
    ("written", 2),  # all data is there; the marker is not
    ("marking", 2),  # the rest of the state is written, and the marker is not
    ("removing", 2),  # the new one is whole; the older one is about to be deleted, or half deleted
    ("swapping", 2),  # the old one has left its path, and the new one has not taken it
    ("random", 5),
)
CODES = {"KILL": {-9}, "TERM": {143, -15}, "INT": {1, 130, -2}}  # how a process ends, by the signal
VICTIMS = ("all", "rank 0", "rank 1")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the whole plan, or a child of it."""
    asked = _parser().parse_args(argv)
    if asked.child:
        _train(asked)
        return 0
    plan = [phase for phase, count in PLAN for _ in range(count)] if asked.random is None else ["random"] * asked.random
    generator = random.Random(asked.seed)
    generator.shuffle(plan)
    plan = plan[: asked.kills] if asked.kills is not None else plan
    asked.output.mkdir(parents=True, exist_ok=True)
    with (asked.output / "log.txt").open("w") as log:
        result = _run(plan, asked, generator, log)
    (asked.output / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["summary"], indent=1))
    return 0 if result["summary"]["ok"] else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("checkpoint_kills"))
    parser.add_argument("--kills", type=int, help="only so many")
    parser.add_argument("--random", type=int, help="so many kills, all at random moments")
    parser.add_argument("--signal", choices=[*CODES], default="KILL")
    parser.add_argument("--compile", action="store_true", help="compile the blocks")
    parser.add_argument("--ranks", type=int, choices=(1, 2), default=2)
    parser.add_argument("--width", type=int, default=1024, help="of 17 square layers; 1024 makes 214 MB of state")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-full-disk", action="store_true")
    for name in ("child", "folder", "phase", "store", "resume"):
        parser.add_argument(f"--{name}", default="", help=argparse.SUPPRESS)
    parser.add_argument("--max-steps", type=int, default=10_000, help=argparse.SUPPRESS)
    parser.add_argument("--no-saves", action="store_true", help=argparse.SUPPRESS)
    return parser


# The parent


def _run(plan: list[str], asked: argparse.Namespace, generator: random.Random, log: Any) -> dict[str, Any]:
    lives: list[dict[str, Any]] = []
    losses: dict[int, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=ROOT.parent) as directory:
        folder = Path(directory)
        for number, phase in enumerate([*plan, "last life"]):
            victims = VICTIMS[number % len(VICTIMS)] if asked.ranks > 1 else "all"
            life = _live(folder, phase, victims, asked, generator, losses)
            lives.append(life)
            print(json.dumps(life), file=log, flush=True)
            print(f"{number + 1}/{len(plan) + 1} {json.dumps(life)}", flush=True)
        steps = max(losses, default=0) + 1
        reference = _uninterrupted(folder, steps, asked)
    differing = [step for step in range(steps) if losses[step] != reference[step]]
    disk = [] if asked.no_full_disk else [_full_disk(asked, asynchronous) for asynchronous in ("async", "sync")]
    for entry in disk:
        print(json.dumps(entry), file=log, flush=True)
    kills = [life for life in lives if life["target"] != "last life"]
    summary = {
        "kills": len(kills),
        "killed_in": dict(Counter(life["phase"] for life in kills)),
        "by_target": dict(Counter(life["target"] for life in kills)),
        "state_megabytes": lives[-1]["state_megabytes"],
        "ranks": asked.ranks,
        "resumed_every_time": all(life["resumed"] for life in lives),
        "ended_well_every_time": all(life["ended_well"] for life in lives),
        "most_checkpoints_of_space": max(life["checkpoints_of_space"] or 0 for life in lives),
        "losses_of_repeated_steps_equal": all(life["same_losses"] for life in lives),
        "steps": steps,
        "steps_that_differ_from_one_uninterrupted_run": differing,
        "steps_repeated": sum(life["repeated"] for life in lives),
        "full_disks_survived": sum(entry["ok"] for entry in disk),
        "full_disks": len(disk),
    }
    summary["ok"] = (
        summary["resumed_every_time"]
        and summary["ended_well_every_time"]
        and summary["losses_of_repeated_steps_equal"]
        and not differing
        and summary["full_disks_survived"] == summary["full_disks"]
    )
    return {
        "summary": summary,
        "lives": lives,
        "full_disk": disk,
        "seed": asked.seed,
        "python": platform.python_version(),
    }


def _live(
    folder: Path,
    phase: str,
    victims: str,
    asked: argparse.Namespace,
    generator: random.Random,
    losses: dict[int, list[float]],
) -> dict[str, Any]:
    """Start the run from the newest checkpoint, kill it in ``phase``, and look at what is left."""
    from lightning_ups.state.checkpoint import is_complete, newest

    whole, codes = _last(folder), list[int]()
    step = 0 if whole is None else _step_of(whole)
    last = phase == "last life"
    options = ["--max-steps", str(max(losses, default=0) + 3)] if last else []
    processes = _start(folder, asked, phase=phase, options=options)
    if last:
        for process in processes:
            assert process.wait(300) == 0
    elif asked.signal == "KILL":
        _kill_in(phase, processes, victims, folder, generator)
    else:
        codes = _signal(asked.signal, processes, folder, generator)
    seen = _phases(folder)
    same, repeated = _compare(folder, losses, asked.ranks)
    started = _read(folder / "started.json")
    kept = [entry for part in ("rolling", "last") for entry in sorted((folder / part).glob("[!.]*"))]
    return {
        "target": phase,
        "phase": "none" if last else (seen[-1]["phase"] if seen else "before the first save"),
        "killed": "nothing" if last else victims,
        "state_megabytes": started["state_megabytes"] if started else None,
        "resumed_from": None if whole is None else whole.name,
        "resumed": started["global_step"] == step if started else asked.signal != "KILL",  # it came before training
        "checkpoints_of_space": round(_space(folder) / started["state_megabytes"] / 1e6, 1) if started else None,
        "saves_begun": sum(entry["phase"] == "staging" for entry in seen),
        "exit_codes": codes,
        "ended_well": {*codes} <= CODES[asked.signal] and "mode stack" not in (folder / "stderr.txt").read_text(),
        "same_losses": same,
        "repeated": repeated,
        "left": {f"{entry.parent.name}/{entry.name}": "whole" if is_complete(entry) else "not" for entry in kept},
        "newest": str(newest_of.name if (newest_of := _newest(folder)) else None),
        "newest_of_each": [getattr(newest(folder / part), "name", None) for part in ("rolling", "last")],
    }


def _start(
    folder: Path, asked: argparse.Namespace, *, phase: str, resume: Path | str = "last", options: Sequence[str] = ()
) -> list[subprocess.Popen[bytes]]:
    for name in ("phases.jsonl", "started.json", *(f"losses_{rank}.jsonl" for rank in range(asked.ranks))):
        (folder / name).unlink(missing_ok=True)
    store = folder / f"store_{time.monotonic_ns()}"
    command = [sys.executable, __file__, "--child", "yes", "--folder", folder, "--phase", phase, "--store", store]
    command += ["--resume", resume, "--width", asked.width, "--ranks", asked.ranks, *options]
    command += ["--compile"] if asked.compile else []
    environment = os.environ | {
        "WORLD_SIZE": str(asked.ranks),
        "LOCAL_WORLD_SIZE": str(asked.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "TORCHELASTIC_RUN_ID": "kills",  # Lightning then takes the ranks as they are
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    error = (folder / "stderr.txt").open("w")
    return [
        subprocess.Popen(
            [str(word) for word in command],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=error,
            start_new_session=True,
        )
        for rank in range(asked.ranks)
    ]


def _kill_in(
    phase: str, processes: list[subprocess.Popen[bytes]], victims: str, folder: Path, generator: random.Random
) -> None:
    deadline, wanted = time.monotonic() + 240, "staging" if phase == "random" else phase
    saves = generator.randint(2, 3)  # earlier ones are let be, so that there is something to lose
    while sum(entry["phase"] == wanted for entry in _phases(folder)) < saves:
        if any(process.poll() is not None for process in processes) or time.monotonic() > deadline:
            _end(processes)
            raise RuntimeError(f"The run ended by itself: {(folder / 'stderr.txt').read_text()[-3000:]}")
        time.sleep(0.0005)
    time.sleep({"random": generator.uniform(0, 3), "writing": generator.uniform(0, 0.3)}.get(phase, 0))
    first = processes if victims == "all" else [processes[int(victims[-1])]]
    for process in first:
        process.send_signal(signal.SIGKILL)
    if victims != "all":
        time.sleep(1.0)  # the other rank has time to do harm
    _end(processes)


def _signal(name: str, processes: list[subprocess.Popen[bytes]], folder: Path, generator: random.Random) -> list[int]:
    deadline = time.monotonic() + 240
    while not (folder / "started.json").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(generator.uniform(0, 6))
    for process in processes:
        process.send_signal(signal.Signals[f"SIG{name}"])
    deadline = time.monotonic() + 90
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(0.01)
    codes = [process.poll() for process in processes]
    _end(processes)
    return [0 if code is None else code for code in codes]


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
        process.wait()


def _newest(folder: Path) -> Path | None:
    from lightning_ups.state.checkpoint import is_complete, newest, resolve

    for part in ("rolling", "last"):
        for entry in (folder / part).glob("*.ckpt"):
            if not is_complete(entry):
                try:
                    found = resolve(entry)
                except FileNotFoundError as error:
                    assert "not whole" in str(error)  # noqa: PT017
                else:
                    assert found != entry
    found = [path for part in ("rolling", "last") if (path := newest(folder / part)) is not None]
    return max(found, key=lambda path: json.loads((path / "complete.json").read_text())["saved_at_ns"], default=None)


def _last(folder: Path) -> Path | None:
    """Return what ``ckpt_path="last"`` should mean."""
    from lightning_ups.state.checkpoint import newest

    return newest(folder / "last") or _newest(folder)


def _space(folder: Path) -> int:
    """Return the bytes in both folders of checkpoints."""
    files = [file for part in ("rolling", "last") for file in (folder / part).rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def _step_of(path: Path) -> int:
    return json.loads((path / "complete.json").read_text())["global_step"]


def _phases(folder: Path) -> list[dict[str, Any]]:
    return list(_lines(folder / "phases.jsonl"))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:  # cut off by the kill
                return


def _read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.exists() else None


def _compare(folder: Path, losses: dict[int, list[float]], count: int) -> tuple[bool, int]:
    """Add the losses of this life to those of earlier ones; return whether repeated steps agree, and their number."""
    ranks = [{line["step"]: line["loss"] for line in _lines(folder / f"losses_{rank}.jsonl")} for rank in range(count)]
    same, repeated = True, 0
    for step in sorted(set.intersection(*map(set, ranks))):
        found = [rank[step] for rank in ranks]
        if step in losses:
            repeated += 1
            same &= losses[step] == found
        losses[step] = found
    return same, repeated


def _uninterrupted(folder: Path, steps: int, asked: argparse.Namespace) -> dict[int, list[float]]:
    processes = _start(folder, asked, phase="never", options=["--max-steps", str(steps), "--no-saves"])
    for process in processes:
        assert process.wait(600) == 0, (folder / "stderr.txt").read_text()[-3000:]
    losses: dict[int, list[float]] = {}
    _compare(folder, losses, asked.ranks)
    return losses


def _full_disk(asked: argparse.Namespace, how: str) -> dict[str, Any]:
    """Train on a file system that holds one checkpoint and a half; then make it larger and train on."""
    megabytes = 17 * asked.width**2 * 12 / 1e6
    with _small_disk(int(megabytes * 1.6)) as folder:
        processes = _start(folder, asked, phase=f"full disk {how}")
        codes = [process.wait(240) for process in processes]
        text = (folder / "stderr.txt").read_text()
        whole = _newest(folder)
        says = [line for line in text.splitlines() if "could not be saved" in line]
        subprocess.run(["mount", "-o", f"remount,size={int(megabytes * 8)}M", str(folder)], check=True)
        options = ["--max-steps", str((_step_of(whole) if whole else 0) + 3)]
        again = _start(folder, asked, phase=f"room again {how}", options=options)
        resumed = [process.wait(240) for process in again] == [0] * asked.ranks
        return {
            "target": f"full disk, {how}",
            "disk_megabytes": int(megabytes * 1.6),
            "ended_with_an_error": all(codes),
            "says": says[-1] if says else "",
            "newest": whole.name if whole else None,
            "resumed": resumed,
            "ok": all(codes) and bool(says) and whole is not None and resumed,
        }


@contextmanager
def _small_disk(megabytes: int) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp())
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}M", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
        folder.rmdir()


# The child: one rank of the run


def _train(asked: argparse.Namespace) -> None:
    import warnings

    import torch
    import torch.distributed as dist
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_ups.callbacks import Compile
    from lightning_ups.strategies import FSDP2Strategy

    warnings.simplefilter("ignore")
    folder, rank = Path(asked.folder), int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{asked.store}", rank=rank, world_size=asked.ranks)

    class Wide(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            layers = (nn.Linear(asked.width, asked.width, bias=False) for _ in range(17))
            self.layers = nn.ModuleList(nn.Sequential(layer, nn.Tanh(), nn.Dropout(0.1)) for layer in layers)

        def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
            (x,) = batch
            for layer in self.layers:
                x = x + layer(x)
            return x.square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    class Losses(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            if rank == 0:
                state = 3 * sum(p.numel() * p.element_size() for p in pl_module.parameters()) / 1e6
                facts = {"global_step": trainer.global_step, "state_megabytes": round(state)}
                (folder / "started.json").write_text(json.dumps(facts))

        def on_train_batch_end(
            self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any, **__: Any
        ) -> None:
            with (folder / f"losses_{rank}.jsonl").open("a") as file:
                loss = outputs["loss"].item().hex()
                print(json.dumps({"step": trainer.global_step - 1, "loss": loss}), file=file)

    strategy = FSDP2Strategy(async_save="sync" not in asked.phase.split())
    strategy.checkpoints.saver.observe = _Observer(folder, asked.phase, rank)
    savers = [
        ModelCheckpoint(folder / "rolling", filename="{step}", save_top_k=1, every_n_train_steps=2),
        ModelCheckpoint(
            folder / "last", save_top_k=0, save_last=True, enable_version_counter=False, every_n_train_steps=3
        ),
    ]
    trainer = Trainer(
        accelerator="cpu",
        devices=asked.ranks,
        strategy=strategy,
        max_steps=asked.max_steps,
        callbacks=[
            Losses(),
            *([Compile(backend="aot_eager")] if asked.compile else []),
            *([] if asked.no_saves else savers),
        ],
        enable_checkpointing=not asked.no_saves,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    torch.manual_seed(1)
    rows = torch.randn(64, asked.width)
    torch.manual_seed(2 + rank)
    module = Wide()
    torch.manual_seed(2 + rank)
    trainer.fit(module, DataLoader(TensorDataset(rows), batch_size=2, shuffle=True), ckpt_path=asked.resume or None)


class _Observer:
    """Writes down each phase of a save, on rank 0, and waits in those that are too short to hit."""

    def __init__(self, folder: Path, target: str, rank: int) -> None:
        self.folder, self.target, self.rank, self.counts = folder, target, rank, Counter()
        if rank == 0 and target in ("removing", "swapping"):
            self._hold_within(target)

    def __call__(self, phase: str, path: Path) -> None:
        if self.rank != 0:
            return
        self._note(phase, path)
        if phase == self.target and phase in ("written", "marking") and self.counts[phase] >= 2:
            time.sleep(10)

    def _note(self, phase: str, path: Path) -> None:
        self.counts[phase] += 1
        with (self.folder / "phases.jsonl").open("a") as file:
            print(json.dumps({"phase": phase, "path": path.name, "at": time.time()}), file=file, flush=True)

    def _hold_within(self, target: str) -> None:
        from lightning_ups.state.checkpoint import folder

        observer = self

        if target == "swapping":
            rename = Path.rename

            def hold_between(path: Path, new: Path) -> Path:
                result = rename(path, new)
                if path.suffix == ".ckpt" and Path(new).name.endswith(".previous"):
                    observer._note("swapping", path)
                    if observer.counts["swapping"] >= 2:
                        time.sleep(10)
                return result

            Path.rename = hold_between  # type: ignore[method-assign,assignment]
            return
        remove = folder.shutil.rmtree

        def hold_half_way(path: Path) -> None:
            if observer.counts["removing"] >= 2:
                next(entry for entry in Path(path).iterdir() if entry.suffix == ".distcp").unlink()
                time.sleep(10)
            remove(path)

        folder.shutil.rmtree = hold_half_way


if __name__ == "__main__":
    sys.exit(main())
