"""SimpleFSDPStrategy beside FSDP2Strategy, eager and with compiled blocks, on our GPT: speed, memory, compile time.

    python benchmarks/simple_fsdp.py --set 1B --output benchmarks/results/DATE_simple_fsdp_1B      # four GPUs
    python benchmarks/simple_fsdp.py --set 1B-2 --output benchmarks/results/DATE_simple_fsdp_1B-2  # two
    python benchmarks/simple_fsdp.py --set 8B --output benchmarks/results/DATE_simple_fsdp_8B      # four; 8B-2 on two
    python benchmarks/simple_fsdp.py --set tiny --output /tmp/tiny                                 # two CPU ranks

Each way runs in processes of its own with an empty compile cache (cold), and, where it compiles, for a few steps again
with the cache that it left (warm). Between the first timed step and the last nothing waits for the device; then three
steps run under torch's profiler on the first rank, whose kernels say how much communication is exposed: the time in
which nothing but communication runs, over the length of a step. Every line of JSON is printed when it is known.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cases import add_to, earlier, keep, left_on_device, prepare, unmet_gpus
from fsdp2 import Config
from processes import Interrupted, finished, result_of

PROFILED = 3
LEAST_S = 45  # a run that gets less is not begun


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a model is trained.

    Args:
        strategy: The name that it is registered by.
        compile: Whether the callback Compile is given; simple_fsdp compiles in any case.
        options: Of the strategy.
    """

    strategy: str
    compile: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def compiles(self) -> bool:
        """Whether anything is compiled."""
        return self.compile or self.strategy == "simple_fsdp"


WAYS = {
    "FSDP2, eager": Way(strategy="fsdp2"),
    "FSDP2, blocks compiled": Way(strategy="fsdp2", compile=True),
    "SimpleFSDP": Way(strategy="simple_fsdp"),
    "SimpleFSDP, kept from forward to backward": Way(strategy="simple_fsdp", options=(("sharding", "gradients"),)),
    "FSDP2, blocks compiled, kept": Way(strategy="fsdp2", compile=True, options=(("sharding", "gradients"),)),
    "SimpleFSDP, collectives apart": Way(strategy="simple_fsdp", options=(("overlap", "none"),)),
}


def sets() -> dict[str, Config]:
    """Return the models and batches that there are, by name."""
    one = Config(name="1B", how="", size="1B", gpus=4, seq=4096, batch=4, steps=24, warmup=6)
    eight = Config(name="8B", how="", size="8B", gpus=4, seq=8192, batch=1, steps=14, warmup=5)
    return {
        "1B": one,
        "1B-2": replace(one, name="1B-2", gpus=2),
        "8B": eight,
        "8B-2": replace(eight, name="8B-2", gpus=2),
        "tiny": Config(name="tiny", how="", size="tiny", gpus=2, seq=64, batch=2, steps=6, warmup=2),
    }


def main() -> None:
    """Run the ways on one set, or, as one rank of it, one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=[*sets()], default="1B")
    parser.add_argument("--ways", nargs="*", choices=[*WAYS], default=[*WAYS], metavar="WAY")
    parser.add_argument("--batch", type=int, help="sequences on each GPU")
    parser.add_argument("--budget", type=float, default=570, help="seconds for everything: later ways are left out")
    parser.add_argument("--timeout", type=float, default=320, help="seconds for one run; a cold one compiles")
    parser.add_argument("--output", type=Path, required=True, help="keep the raw output in this folder")
    parser.add_argument("--backend", default="inductor", help=argparse.SUPPRESS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    config = sets()[options.set]
    if options.batch:
        config = replace(config, batch=options.batch)
    if options.worker:
        work(config, WAYS[options.worker], backend=options.backend)
        return
    if options.set != "tiny" and (lacks := unmet_gpus(config.gpus, what=f"set {options.set}", size=config.size)):
        parser.error(lacks)
    prepare(parser, options.output)
    before, results = earlier(options.output / "result.json"), list[dict[str, Any]]()
    try:
        # The caches are large, hold paths of this machine, and would make another call's cold runs warm.
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as caches:
            for result in run_all(config, options, caches=Path(caches)):
                results.append(result)
                keep(options.output / "result.json", [*before, *results])
                (options.output / "table.md").write_text(table(results) + "\n")
    finally:  # also when it is told to end
        print(table(results), flush=True)


def run_all(config: Config, options: argparse.Namespace, *, caches: Path) -> Iterator[dict[str, Any]]:
    """Run each way cold and, if it compiles, warm, while the budget lasts; yield what comes out of each."""
    start = time.monotonic()
    for name in options.ways:
        cache, found = caches / f"{options.set} {name}".replace(" ", "_").replace(",", ""), dict[str, Any]()
        for steps in ("cold", "warm") if WAYS[name].compiles else ("cold",):
            left = options.budget - (time.monotonic() - start)
            if "error" in found:
                print(f"{name}, {steps}: left out, the cold run failed", flush=True)
                continue
            if left < LEAST_S or (steps == "warm" and not found):
                print(f"{name}, {steps}: left out, {left:.0f} s of the budget are left", flush=True)
                continue
            interrupted = None
            try:
                found, text = launch(config, name, options, cache=cache, warm=steps == "warm", timeout=left)
            except Interrupted as error:
                interrupted, text = error, error.said
                found = {"error": "interrupted"}
            result = {"way": name, "cache": steps, "set": options.set, **found}
            add_to(options.output / "log.txt", f"===== {name}, {steps}\n{text}\n")
            print(json.dumps(result), flush=True)
            yield result
            if interrupted is not None:
                raise interrupted


def launch(
    config: Config, name: str, options: argparse.Namespace, *, cache: Path, warm: bool, timeout: float
) -> tuple[dict[str, Any], str]:
    """Run one way in processes of its own; return its figures and what it wrote."""
    command = [sys.executable, __file__, "--set", config.name, "--batch", str(config.batch)]
    command += ["--output", str(options.output), "--backend", options.backend, "--worker", name]
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "UPS_WARM": "1" if warm else ""}
    began = time.monotonic()
    out = finished(command, timeout=min(options.timeout, timeout), ranks=config.gpus, environment=caches)
    return result_of(out) | {"wall_s": round(time.monotonic() - began, 1)}, out


def work(config: Config, way: Way, *, backend: str) -> None:
    """Train on this rank, and print what the first rank finds."""
    import torch
    import torch.distributed as dist
    from fsdp2 import _batches, _watch
    from lightning.pytorch import Trainer, seed_everything

    from lightning_ups.callbacks import Compile
    from lightning_ups.models.gpt import GPTModule
    from lightning_ups.order import applied
    from lightning_ups.precision import BF16Precision

    cuda = torch.cuda.is_available()
    if os.environ.get("UPS_WARM"):
        config = replace(config, warmup=1, steps=3)
    whole = replace(config, steps=config.steps + PROFILED + 1)  # the profiler's steps are not timed
    seed_everything(1, verbose=False)
    watch, more = _watch(config), _first_and_profiled(config)
    # The backend is the callback's, so for tests it is given; otherwise simple_fsdp compiles by itself.
    given = way.compile or (way.compiles and backend != "inductor")
    callbacks = [watch, more, *([Compile(backend=backend)] if given else [])]
    trainer = Trainer(
        accelerator="cuda" if cuda else "cpu",
        devices=config.gpus,
        strategy=_strategy(way),
        plugins=[BF16Precision(weights="masters")],
        max_steps=whole.steps,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    module = GPTModule(
        size=config.size,  # type: ignore[arg-type]
        max_seq_len=config.seq,
        lr=config.lr,
        schedule="constant",
        warmup_steps=5,
        fused=True,
    )
    kept: dict[str, Any] = {}
    module.on_train_end = lambda: kept.update(applied(trainer.strategy).report.parts)  # type: ignore[method-assign, union-attr]
    with left_on_device(module):
        trainer.fit(module, _batches(whole))
    losses = torch.stack(watch.losses).float()
    peak = torch.tensor([more.peak, more.first_peak], device=losses.device)
    dist.all_reduce(losses)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    if trainer.is_global_zero:
        seconds, steps = watch.seconds(), config.steps - config.warmup
        graphs = kept.get("SimpleFSDPStrategy", {}).get("graphs", [])
        figures = {
            "tokens_per_s_per_gpu": round(config.seq * config.batch * steps / seconds, 1),
            "ms_per_step": round(1000 * seconds / steps, 2),
            "peak_gib": round(peak[0].item() / 2**30, 2),
            "first_step_peak_gib": round(peak[1].item() / 2**30, 2),
            "first_step_s": round(more.first_s, 1),
            "exposed_communication": more.exposed(),
            "losses": [round(loss, 5) for loss in (losses / config.gpus).tolist()],
            "graphs": graphs,
            "torch": version("torch"),
            "device": torch.cuda.get_device_name() if cuda else "cpu",
        }
        print("\nRESULT " + json.dumps(figures), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _strategy(way: Way) -> Any:
    from lightning_ups.strategies import FSDP2Strategy, SimpleFSDPStrategy

    kinds: dict[str, Callable[..., Any]] = {"fsdp2": FSDP2Strategy, "simple_fsdp": SimpleFSDPStrategy}
    return kinds[way.strategy](meta_device=True, initialise_on="device", **dict(way.options))


def _first_and_profiled(config: Config) -> Any:
    import torch
    from lightning.pytorch import Callback
    from step_profile import spans_by_part, split
    from torch.profiler import ProfilerActivity, profile

    class FirstAndProfiled(Callback):
        """Times the first step, which compiles; reads the peak of memory; profiles steps after the timed ones."""

        def __init__(self) -> None:
            self.first_s = self.peak = self.first_peak = 0.0
            self._began = 0.0
            self._events: list[dict[str, Any]] = []
            self._profile: Any = None

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                _wait()
                self._began = time.perf_counter()

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                _wait()
                self.first_s = time.perf_counter() - self._began
            if not torch.cuda.is_available():
                return
            if batch_idx == 0:  # which compiles, tries graphs and measures kernels: not what a run needs
                self.first_peak = float(torch.cuda.max_memory_allocated())
                torch.cuda.reset_peak_memory_stats()
            if trainer.global_step == config.steps:
                self.peak = float(torch.cuda.max_memory_allocated())
            if trainer.global_step == config.steps + 1:
                _wait()
                if trainer.is_global_zero:
                    self._profile = profile(activities=[ProfilerActivity.CUDA])
                    self._profile.start()
            if trainer.global_step == config.steps + 1 + PROFILED and self._profile is not None:
                _wait()
                self._profile.stop()
                path = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).with_suffix(".trace.json")
                path.parent.mkdir(parents=True, exist_ok=True)
                self._profile.export_chrome_trace(str(path))
                self._events = json.loads(path.read_text())["traceEvents"]
                path.unlink()

        def exposed(self) -> dict[str, float] | None:
            if not self._events:
                return None
            found = split(spans_by_part(self._events), steps=PROFILED)
            shares = {part: found.get(part, 0.0) / found["step"] for part in ("exposed communication", "idle")}
            return {"communication_ms": found.get("communication", 0.0), "step_ms": found["step"], **shares}

    def _wait() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return FirstAndProfiled()


def table(results: list[dict[str, Any]]) -> str:
    """Return the figures of the cold runs, each beside FSDP2's eager ones, and the first steps of both."""
    lines = [
        "| way | tok/s per GPU | to FSDP2 eager | peak GiB | to it | exposed | first step cold, warm, s | last loss |",
        "|---|---|---|---|---|---|---|---|",
    ]
    cold = {r["way"]: r for r in results if r["cache"] == "cold"}
    warm = {r["way"]: r for r in results if r["cache"] == "warm"}
    base = cold.get("FSDP2, eager", {})
    for way, result in cold.items():
        if "error" in result:
            last = (result["error"].splitlines() or ["no output"])[-1]
            lines.append(f"| {way} | {last[:90]} | | | | | | |")
            continue
        exposed = result["exposed_communication"]
        first = f"{result['first_step_s']}, {warm.get(way, {}).get('first_step_s', '')}".removesuffix(", ")
        cells = [
            way,
            f"{result['tokens_per_s_per_gpu']:.0f}",
            _beside(result, base, "tokens_per_s_per_gpu"),
            f"{result['peak_gib']:.1f}",
            _beside(result, base, "peak_gib"),
            "" if exposed is None else f"{exposed['exposed communication']:.1%}",
            first,
            f"{result['losses'][-1]:.4f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _beside(result: dict[str, Any], base: dict[str, Any], figure: str) -> str:
    return f"{result[figure] / base[figure] - 1:+.1%}" if base.get(figure) else ""


if __name__ == "__main__":
    main()
