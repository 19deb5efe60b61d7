"""What `Compile(cache=...)` saves of a second start, and what it costs the first.

    python benchmarks/compile_cache.py --output benchmarks/results/DATE_compile_cache

Each start is a process of its own with an empty folder for inductor's and Triton's caches, so that all that a warm one
finds is the file that the cold one before it has written. The same batches, whole models as `scope="auto"` has them on
one GPU. Told are the seconds from the beginning of training to the end of its first step, what of them was compilation,
and where its seconds went by torch's own clocks, which hold one another; programs in the file, its size, and the
losses. A later case needs the one before it. A start without a cache shows what keeping the file costs.
UPS_BENCH_SIZE=tiny tries it all on any machine.
"""

import os
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

from cases import left_on_device, main

TINY = os.environ.get("UPS_BENCH_SIZE") == "tiny"
STEPS = 3
KEPT = ("bf16", "tensorwise") if not TINY else ("bf16",)


def start(precision: str, kind: str) -> dict[str, Any]:
    """Train three steps in this process, which has compiled nothing, and say what it waited for.

    Args:
        precision: ``"bf16"``, or a recipe of `Float8Precision`.
        kind: ``"without"`` a file, ``"cold"`` for one that is not there yet, or ``"warm"``.
    """
    file = Path(tempfile.gettempdir()) / f"compiled_{os.getppid()}_{precision}.bin"
    if kind == "warm" and not file.exists():
        raise SystemExit("a warm start needs the file of a cold one: run that case before this one, in one call")
    if kind == "cold":
        file.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder  # Triton's caches lie in it, too
        os.environ.pop("TRITON_CACHE_DIR", None)
        found = _fit(precision, None if kind == "without" else file)
    if kind != "without":
        found["file MiB"] = round(file.stat().st_size / 2**20, 2)
    if kind == "warm":
        file.unlink()
    return found


def _fit(precision: str, file: Path | None) -> dict[str, Any]:
    import torch
    from lightning.pytorch import Callback, Trainer, seed_everything

    from lightning_ups.callbacks import Compile
    from lightning_ups.data import RandomTokens
    from lightning_ups.models import GPTModule
    from lightning_ups.models.gpt import SIZES
    from lightning_ups.order import report_of
    from lightning_ups.precision import BF16Precision, Float8Precision

    cuda = torch.cuda.is_available()
    size, seq, batch = ("tiny", 32, 2) if TINY else ("1B", 4096, 4)
    float8: Any = Float8Precision
    chosen = (BF16Precision if precision == "bf16" else partial(float8, recipe=precision))(weights="masters")
    facts: dict[str, Any] = {}

    class Watch(Callback):
        def __init__(self) -> None:
            self.losses: list[float] = []

        def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
            self.began = time.perf_counter()

        def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, *_: Any, **__: Any) -> None:
            self.losses.append(outputs["loss"].item())
            facts.setdefault("first step s", round(time.perf_counter() - self.began, 2))

        def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
            facts["compile"] = report_of(trainer).parts["Compile"]

    watch = Watch()
    seed_everything(0, verbose=False)
    module = GPTModule(size=size, max_seq_len=seq, schedule="constant", warmup_steps=1)  # type: ignore[arg-type]
    data = RandomTokens(vocab_size=SIZES[size].vocab_size, seq_len=seq, batch_size=batch)
    trainer = Trainer(
        accelerator="cuda" if cuda else "cpu", devices=1, max_steps=STEPS, plugins=[chosen], logger=False,
        callbacks=[watch, Compile(scope="model", cache=file)], enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, limit_val_batches=0, num_sanity_val_steps=0,
    )  # fmt: skip
    began = time.perf_counter()
    with left_on_device(module):
        trainer.fit(module, data)
    return {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "fit s": round(time.perf_counter() - began, 2),
        **_told(facts.pop("compile")),
        **facts,
        "seconds by torch": _by_torch(),
        "losses": watch.losses,
    }


def _by_torch() -> dict[str, float]:
    from torch._dynamo.utils import compilation_time_metrics  # noqa: TID251

    seconds = {name: sum(times) for name, times in compilation_time_metrics.items()}
    return {name: round(value, 2) for name, value in sorted(seconds.items(), key=lambda each: -each[1]) if value > 0.2}


def _told(compiled: dict[str, Any]) -> dict[str, Any]:
    cache = compiled.get("cache", {})
    return {
        "compile": {name: value for name, value in compiled.items() if name != "cache"},
        "loaded": cache.get("loaded"),
        "saved": cache.get("saved"),
    }


KINDS = ("without", "cold", "warm")
CASES = {f"{precision}, {kind}": partial(start, precision, kind) for precision in KEPT for kind in KINDS}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(CASES, columns=("first step s", "fit s", "loaded", "saved", "file MiB"), timeout_s=200)
