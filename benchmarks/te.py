"""TEPrecision on a GPU: what the CPU cannot show. Each case prints PASS or FAIL for each check, and its figures.

    python benchmarks/te.py --set checks --output benchmarks/results/DATE_te   # within --budget seconds, as is each set
    python benchmarks/te.py --set two-gpus --output ...
    python benchmarks/te.py --set speed --output ...
    python benchmarks/te.py --cases conversion recompute                   # some of it
    python benchmarks/te.py --cases "speed bf16" "speed delayed" --budget 540

Speed is of the 1.5 B GPT, seq 4096, batch 4. What needs two GPUs says so where there is one. Without a GPU the same
code runs at a tiny size, which needs a double of Transformer Engine: the tests have one.
"""

import argparse
import contextlib
import gc
import itertools
import math
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cases import left_on_device, main
from lightning.pytorch import Callback, Trainer, seed_everything
from processes import portable
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_ups.callbacks import ActivationCheckpoint, Compile
from lightning_ups.models import GPTModule
from lightning_ups.models.gpt import GPT, SIZES, GPTConfig
from lightning_ups.order import applied
from lightning_ups.precision import BF16Precision, Float8Precision, TEPrecision
from lightning_ups.strategies import FSDP2Strategy
from lightning_ups.transforms.te import RECIPES as KNOWN
from lightning_ups.transforms.te import convert_to_te

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
SEQ, BATCH, STEPS = (512, 4, 8) if CUDA else (64, 4, 6)
LR = 3e-5 if CUDA else 3e-4  # the loss falls in a straight line, far from what one batch by heart would give
SHAPE = GPTConfig(
    dim=1024 if CUDA else 64,
    num_layers=4 if CUDA else 2,
    num_heads=8 if CUDA else 2,
    num_kv_heads=4 if CUDA else 1,
    ffn_dim=4096 if CUDA else 128,
    vocab_size=4096 if CUDA else 128,
    max_seq_len=SEQ,
)
RECIPES = ("delayed", "current", "block")


class Checks:
    """What was looked at, in words, and whether it holds."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.failed: list[str] = []

    def check(self, name: str, *, ok: bool, figures: object = "") -> None:
        """Keep and print one."""
        line = f"{'PASS' if ok else 'FAIL'} {name}: {figures}"
        print(line, flush=True)
        self.found.append(line)
        if not ok:
            self.failed.append(name)

    @contextlib.contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """Turn an error into a failed check, so that the others are seen."""
        try:
            yield
        except Exception as error:  # noqa: BLE001
            self.check(name, ok=False, figures=f"{type(error).__name__}: {str(error)[:400]}")

    def refused(self, name: str, run: Callable[[], Any], *, by: str = "TEPrecision") -> None:
        """Check that ``run`` ends with an error that says ``by``."""
        try:
            run()
        except (ValueError, RuntimeError) as error:
            self.check(name, ok=by in str(error), figures=str(error)[:200])
        else:
            self.check(name, ok=False, figures="it ran")

    def result(self) -> dict[str, Any]:
        """Return them as figures of a case."""
        return {"ok": not self.failed, "failed": self.failed, "num_checks": len(self.found), "checks": self.found}


class Tokens(Dataset[torch.Tensor]):
    """One batch, over and over, so that losses fall, and a run that goes on sees what it would have seen."""

    def __init__(self, *, seq: int, vocab: int, size: int = 10_000) -> None:
        generator = torch.Generator().manual_seed(1)
        self.rows = torch.randint(0, vocab, (BATCH, seq + 1), generator=generator)
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index % len(self.rows)]


class Watch(Callback):
    """Losses of every step, and the time and memory of those after the first third."""

    def __init__(self, steps: int) -> None:
        self.losses: list[torch.Tensor] = []
        self.warmup, self.seconds, self.typical_ms, self.peak_gib = max(1, steps // 3), 0.0, 0.0, 0.0
        self.facts: dict[str, Any] = {}
        self._marks: list[Any] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Keep the loss, and when the device got so far."""
        self.losses.append(outputs["loss"].detach())
        self._marks.append(_mark())

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Look at the clock, the memory and the report."""
        _wait()
        marks = self._marks[self.warmup - 1 :]
        times = [_between(*pair) for pair in itertools.pairwise(marks)]
        if times:
            self.seconds, self.typical_ms = statistics.fmean(times), 1e3 * statistics.median(times)
        self.peak_gib = torch.cuda.max_memory_allocated() / 2**30 if CUDA else 0.0
        if (context := applied(trainer.strategy)) is not None:
            self.facts = dict(context.report.parts)


class SaveAt(Callback):
    """Saves a checkpoint after so many steps."""

    def __init__(self, step: int, path: Path) -> None:
        self._step, self._path = step, path

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Save it, if it is time."""
        if trainer.global_step == self._step:
            trainer.save_checkpoint(self._path)


def _mark() -> Any:
    if not CUDA:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(start: Any, end: Any) -> float:
    return start.elapsed_time(end) / 1e3 if CUDA else end - start


def _wait() -> None:
    if CUDA:
        torch.cuda.synchronize()


class Net(GPTModule):
    """The GPT of `SHAPE`, which learns without a schedule."""

    shape = SHAPE

    def __init__(self) -> None:
        super().__init__(lr=LR, warmup_steps=1, schedule="constant")

    def configure_model(self) -> None:
        """Build it, the same each time."""
        if not hasattr(self, "model"):
            torch.manual_seed(0)
            with DEVICE:  # where drawing takes no time
                self.model = GPT(self.shape)


class Forgetful(Net):
    """One of its feed-forward networks does not learn: a fault, which shows how much of one is seen."""

    def configure_model(self) -> None:
        """Build it, and lose gradients."""
        super().configure_model()
        for parameter in self.model.get_submodule("layers.1.ffn").parameters():
            parameter.register_hook(torch.zeros_like)


def train(
    precision: Any, *, steps: int = STEPS, callbacks: tuple[Any, ...] = (), module: Any = None, **options: Any
) -> tuple[list[float], Watch, Trainer]:
    """Train on the few sequences, and return the losses, what was measured, and the Trainer."""
    if CUDA:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    seed_everything(0, verbose=False)
    watch = Watch(steps)
    seq, batch = options.pop("seq", SEQ), options.pop("batch", BATCH)
    ckpt_path = options.pop("ckpt_path", None)
    settings: dict[str, Any] = {
        "accelerator": DEVICE.type, "devices": 1, "max_steps": steps, "plugins": [precision], "logger": False,
        "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
        "callbacks": [watch, *callbacks], "default_root_dir": tempfile.gettempdir(),
    }  # fmt: skip
    trainer = Trainer(**settings | options)
    module = module or Net()
    vocab = module.model.config.vocab_size if hasattr(module, "model") else SHAPE.vocab_size
    data = DataLoader(Tokens(seq=seq, vocab=vocab), batch_size=batch)
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return [loss.item() for loss in watch.losses], watch, trainer


def losses_of(precision: Any, **options: Any) -> list[float]:
    """Return the losses of a training alone."""
    return train(precision, **options)[0]


def apart(found: Sequence[float], wanted: Sequence[float], *, learned: float | None = None) -> float:
    """Return how far losses are apart where most: a share of what was ``learned``, or in all of ``wanted``.

    Not a share of the loss: where little of that is left, a step later or earlier is most of it.
    """
    if not all(map(math.isfinite, (*found, *wanted))):
        return math.inf
    return max(abs(a - b) for a, b in zip(found, wanted, strict=True)) / (learned or wanted[0] - min(wanted))


# One module: logits and gradients against float32


def _errors(
    model: nn.Module, reference: tuple[torch.Tensor, dict[str, torch.Tensor]], **options: Any
) -> dict[str, float]:
    logits, gradients = _run(model, **options)
    wanted, others = reference
    worst = max(_distance(gradients[name], other) for name, other in others.items())
    return {"logits": round(_distance(logits, wanted), 5), "worst_gradient": round(worst, 5)}


def _distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found.float() - wanted.float()).norm() / wanted.float().norm().clamp(min=1e-12)).item()


def _run(
    model: nn.Module, *, context: Callable[[], Any] = contextlib.nullcontext
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 32, (BATCH, SEQ), generator=generator).to(DEVICE)
    model.zero_grad()
    with context():
        out = model(tokens)
    logits = out if isinstance(out, torch.Tensor) else out.logits
    weights = torch.randn(logits.shape, generator=generator).to(DEVICE)
    (logits.float() * weights).mean().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=SHAPE.dim,
            intermediate_size=SHAPE.ffn_dim,
            num_hidden_layers=2,
            num_attention_heads=SHAPE.num_heads,
            num_key_value_heads=SHAPE.num_kv_heads,
            vocab_size=SHAPE.vocab_size,
            use_cache=False,
        )
    )


def conversion() -> dict[str, Any]:
    """Logits and gradients in bfloat16 and each recipe, fused and apart, against float32."""
    from lightning_ups._compat.optional.te import autocast

    checks = Checks()
    for name, build in {"GPT": partial(GPT, SHAPE), "Llama": _llama}.items():
        with checks.attempt(f"{name} can be built"):
            torch.manual_seed(0)
            model = build().to(DEVICE)
            reference = _run(model)
            low = partial(torch.autocast, DEVICE.type, dtype=torch.bfloat16)
            plain = _errors(model, reference, context=low)
            for fuse in ("all", "none"):
                with checks.attempt(f"{name}, fuse={fuse}"):
                    done = convert_to_te(model, fuse=fuse, multiple=1)
                    found = _errors(model, reference, context=low)
                    ok = all(found[k] < 2 * plain[k] + 1e-3 for k in found)
                    checks.check(
                        f"{name} in bfloat16, fuse={fuse}, as torch's", ok=ok, figures={"te": found, "torch": plain}
                    )
                    done.lay_together()
                    again = _errors(model, reference, context=low)
                    same = all(abs(again[k] - found[k]) < 1e-3 for k in found)  # attention adds in any order
                    checks.check(f"{name}, fuse={fuse}, joined without a copy", ok=same, figures=again)
                    done.undo()
        for recipe in RECIPES:
            with checks.attempt(f"{name}, {recipe}"):
                done = convert_to_te(model, fuse="all", once=recipe == "delayed")
                made = KNOWN[recipe].make(amax_history=16)

                @contextlib.contextmanager
                def float8(done: Any = done, made: Any = made) -> Iterator[None]:
                    done.calls.begin()
                    with torch.autocast(DEVICE.type, dtype=torch.bfloat16), autocast(made, group=None):
                        yield

                if recipe == "delayed":  # its scales come from a step before, which must have lost no gradient
                    done.begin_scales(recipe=made)
                    _run(model, context=float8)
                found = _errors(model, reference, context=float8)
                ok = plain["logits"] < found["logits"] < 0.35 and found["worst_gradient"] < 0.35
                checks.check(f"{name} in float8, {recipe}", ok=ok, figures=found)
                done.undo()
    return checks.result()


# Training


def recipes() -> dict[str, Any]:
    """Each recipe by name: losses beside bfloat16's, and what the device lacks.

    The band is half of what it does if one feed-forward network of all does not learn; in bfloat16 a tenth.
    """
    checks = Checks()
    wanted = losses_of(BF16Precision(weights="masters"))
    fault = apart(losses_of(BF16Precision(weights="masters"), module=Forgetful()), wanted)
    figures: dict[str, Any] = {"fault": round(fault, 5), "losses": [round(loss, 3) for loss in wanted]}
    with contextlib.suppress(ImportError):
        figures["torchao"] = round(apart(losses_of(Float8Precision(weights="masters", emulate=not CUDA)), wanted), 5)
    checks.check("the fault is large enough to tell", ok=fault > 0.02, figures=figures)
    for recipe in (None, *RECIPES):
        for weights in ("masters", "autocast"):
            with checks.attempt(f"{recipe}, {weights}"):
                found = losses_of(TEPrecision(recipe=recipe, weights=weights))
                _near(checks, f"{recipe}, {weights}", found, wanted, limit=fault / (10 if recipe is None else 2))
    with checks.attempt("the fault is seen"):
        distance = apart(losses_of(TEPrecision(weights="masters", recipe="delayed"), module=Forgetful()), wanted)
        checks.check("the fault is seen", ok=distance > fault / 2, figures=round(distance, 5))
    if not CUDA or torch.cuda.get_device_capability() < (10, 0):
        checks.refused("mxfp8 is refused here", lambda: train(TEPrecision(weights="masters", recipe="mxfp8")))
    with checks.attempt("a number format"):
        name = "delayed in e4m3 by the most recent of 4"
        settings: dict[str, Any] = {"number_format": "e4m3", "amax_history": 4, "amax_compute": "most_recent"}
        _near(
            checks,
            name,
            losses_of(TEPrecision(weights="masters", recipe="delayed", **settings)),
            wanted,
            limit=fault / 2,
        )
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0}
    other = losses_of(BF16Precision(weights="masters"), **options)
    for recipe in (None, "delayed"):
        with checks.attempt(f"{recipe}, accumulation and clipping"):
            found, limit = (
                losses_of(TEPrecision(weights="masters", recipe=recipe), **options),
                fault / (10 if recipe is None else 2),
            )
            _near(checks, f"{recipe}, accumulation and clipping", found, other, limit=limit)
    return checks.result()


def _near(checks: Checks, name: str, found: Sequence[float], wanted: Sequence[float], *, limit: float) -> None:
    distance = apart(found, wanted)
    figures = {"apart": round(distance, 5), "limit": round(limit, 5), "losses": [round(loss, 3) for loss in found]}
    checks.check(name, ok=distance < limit, figures=figures)


def checkpoints() -> dict[str, Any]:
    """A checkpoint moves between bfloat16, torchao's float8 and Transformer Engine, and a run goes on as it was.

    Where the precision changes, the band is twice what the precisions are apart without any checkpoint.
    """
    checks, half = Checks(), STEPS // 2
    makers: dict[str, Callable[[], Any]] = {
        "delayed": lambda: TEPrecision(weights="masters", recipe="delayed", amax_history=16),
        "current": lambda: TEPrecision(weights="masters", recipe="current"),
        "bf16": partial(BF16Precision, weights="masters"),
    }
    with contextlib.suppress(ImportError):
        import torchao  # noqa: F401  (only whether it is there)

        makers["float8"] = lambda: Float8Precision(weights="masters", emulate=not CUDA)
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder) / f"{name}.ckpt" for name in makers}
        whole: dict[str, list[float]] = {}
        for name, make in makers.items():
            with checks.attempt(f"{name} alone"):
                whole[name] = losses_of(make(), callbacks=(SaveAt(half, paths[name]),))
        same, other = 1e-3, 2 * max(apart(losses, whole["bf16"]) for losses in whole.values())
        for first, losses in whole.items():
            state = torch.load(paths[first], weights_only=True, mmap=True)["state_dict"]
            plain = _plain_names() == list(state) and {v.dtype for v in state.values()} == {torch.float32}
            checks.check(f"{first}: plain names and float32", ok=plain, figures=len(state))
            for second in whole:
                if not {first, second} & {"delayed", "current"}:
                    continue  # none of them is Transformer Engine's
                with checks.attempt(f"{first} to {second}"):
                    found, limit = (
                        losses_of(makers[second](), ckpt_path=paths[first]),
                        same if first == second else other,
                    )
                    distance = apart(found, losses[half:], learned=losses[0] - min(losses))
                    figures = {"apart": round(distance, 6), "limit": round(limit, 5)}
                    checks.check(f"{first} to {second}", ok=distance < limit, figures=figures)
        for name, limit in (("moments", same), ("a network", other)):
            with checks.attempt(f"lost with the checkpoint: {name}"):
                distance = _after_a_loss(name, paths["bf16"], whole["bf16"], half)
                figures = {"apart": round(distance, 6), "limit": round(limit, 5)}
                checks.check(f"it would be seen if {name} were lost", ok=distance > limit, figures=figures)
    return checks.result()


def _after_a_loss(what: str, path: Path, losses: list[float], half: int) -> float:
    """Return how far apart a run in bfloat16 is that goes on without the moments, or without one network's weights."""
    module = Net()
    module.configure_model()
    state = torch.load(path, weights_only=True)["state_dict"]
    kept = {name: value for name, value in state.items() if what == "moments" or ".layers.1.ffn." not in name}
    module.load_state_dict(kept, strict=False)
    found = losses_of(BF16Precision(weights="masters"), module=module, steps=STEPS - half)
    return apart(found, losses[half:], learned=losses[0] - min(losses))


def _plain_names() -> list[str]:
    module = Net()
    with torch.device("meta"):
        module.configure_model()
    return list(module.state_dict())


def recompute() -> dict[str, Any]:
    """Recomputed blocks through Transformer Engine's checkpoint: the same losses, in less memory."""
    checks = Checks()
    for recipe in (None, *RECIPES):
        without, before, _ = train(TEPrecision(weights="masters", recipe=recipe))
        for save in ("nothing", "matmuls"):
            with checks.attempt(f"{recipe}, save={save}"):
                found, after, _ = train(
                    TEPrecision(weights="masters", recipe=recipe), callbacks=(ActivationCheckpoint(save=save),)
                )
                memory = {"gib": round(after.peak_gib, 3), "without": round(before.peak_gib, 3)}
                ok = apart(found, without) < 1e-3 and (not CUDA or after.peak_gib <= before.peak_gib)
                checks.check(f"{recipe}, save={save}", ok=ok, figures={"apart": apart(found, without), **memory})
    return checks.result()


def compiled() -> dict[str, Any]:
    """Blocks compiled between Transformer Engine's modules, and what is refused."""
    checks, backend = Checks(), "inductor" if CUDA else "aot_eager"
    for recipe in (None, "current", "block"):
        with checks.attempt(f"{recipe}, compiled"):
            steps = 5 * STEPS  # enough for the time of a typical one
            without, before, _ = train(TEPrecision(weights="masters", recipe=recipe), steps=steps)
            found, after, _ = train(
                TEPrecision(weights="masters", recipe=recipe), steps=steps, callbacks=(Compile(backend=backend),)
            )
            distance, facts = apart(found[:STEPS], without[:STEPS]), _of_blocks(after)
            figures = {name: facts[name] for name in ("graphs", "breaks", "recompiles")} | {"apart": round(distance, 5)}
            figures |= {"ms": round(after.typical_ms, 2), "eager_ms": round(before.typical_ms, 2)}
            # Three modules of Transformer Engine in a block, no part of any graph, and one graph after each of them.
            apart_by_them = all("marked as skipped" in reason for reason in facts["breaks"])
            ok = distance < 0.02 and facts["graphs"] == 3 and apart_by_them and not facts["recompiles"]
            checks.check(f"{recipe}, compiled", ok=ok, figures=figures)
    checks.refused(
        "delayed scaling, compiled",
        lambda: train(TEPrecision(weights="masters", recipe="delayed"), callbacks=(Compile(backend=backend),)),
    )
    return checks.result()


def _of_blocks(watch: Watch) -> dict[str, Any]:
    (facts,) = (group for group in watch.facts["Compile"]["groups"] if group["class"] == "Block")
    return facts


# Two GPUs


def ddp() -> dict[str, Any]:
    """Two GPUs by DDP: losses near one GPU's, and the same weights and scales on both."""
    return _on_two("ddp", lambda: "ddp")


def fsdp2() -> dict[str, Any]:
    """Two GPUs by FSDP2: the same, sharded, with checkpoints that go to one GPU."""
    return _on_two("fsdp2", FSDP2Strategy)


def _on_two(name: str, strategy: Callable[[], Any]) -> dict[str, Any]:
    import torch.distributed as dist

    if torch.cuda.device_count() < 2:
        return {"ok": None, "skipped": f"needs 2 GPUs, {torch.cuda.device_count()} visible"}
    checks = Checks()
    for recipe in (None, *RECIPES):
        with checks.attempt(f"{name}, {recipe}"):
            # Every rank sees the same batches: the losses are those of one GPU.
            precision = TEPrecision(weights="masters", recipe=recipe)
            found, watch, trainer = train(
                precision, strategy=strategy(), devices=2, use_distributed_sampler=False, barebones=False
            )
            scales = trainer.precision_plugin.state_dict().get("scales", {})
            mine = sum(v.double().sum().item() for s in scales.values() for v in s.values())
            both: list[Any] = [None, None]
            if dist.is_initialized():
                dist.all_gather_object(both, (mine, found))
            alone = os.environ.get("LOCAL_RANK", "0") == "0"
            one, _, _ = (
                train(TEPrecision(weights="masters", recipe=recipe), strategy="auto") if alone else (found, None, None)
            )
            figures = {"apart_from_one": round(apart(found, one), 5), "gib": round(watch.peak_gib, 3)}
            checks.check(f"{name}, {recipe}", ok=apart(found, one) < 0.03 and both[0] == both[1], figures=figures)
            if dist.is_initialized():
                dist.barrier()
    return checks.result()


# Speed


def speed(recipe: str, *, compile: bool = False, fuse: str = "auto") -> dict[str, Any]:
    """Tokens a second and peak memory of the 1.5 B GPT, or, without a GPU, of the tiny one."""
    size = "1B" if CUDA else "tiny"
    seq, batch, steps = (4096, 4, 15) if CUDA else (32, 2, 3)
    module = GPTModule(size=size, max_seq_len=seq, lr=3e-4, warmup_steps=1, schedule="constant")
    torch.manual_seed(0)
    with DEVICE:  # where drawing takes no time
        module.configure_model()
    precision: Any = BF16Precision(weights="masters")
    if recipe != "bf16":
        precision = TEPrecision(weights="masters", recipe=None if recipe == "none" else recipe, fuse=fuse)  # type: ignore[arg-type]
    callbacks = (Compile(backend="inductor" if CUDA else "aot_eager"),) if compile else ()
    with left_on_device(module):
        losses, watch, _ = train(precision, steps=steps, module=module, callbacks=callbacks, seq=seq, batch=batch)
    flops = SIZES[size].flops_per_token(seq)
    tokens_s = seq * batch / watch.seconds
    return {
        "ok": all(map(math.isfinite, losses)),
        "tokens_s": round(tokens_s, 1),
        "tflops": round(tokens_s * flops / 1e12, 1),
        "gib": round(watch.peak_gib, 2),
        "first_loss": round(losses[0], 4),
        "last_loss": round(losses[-1], 4),
    }


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "conversion": conversion,
    "recipes": recipes,
    "checkpoints": checkpoints,
    "recompute": recompute,
    "compiled": compiled,
    "ddp": ddp,
    "fsdp2": fsdp2,
    "speed bf16": partial(speed, "bf16"),
    "speed bf16, compiled": partial(speed, "bf16", compile=True),
    "speed none": partial(speed, "none"),
    "speed delayed": partial(speed, "delayed"),
    "speed current": partial(speed, "current"),
    "speed block": partial(speed, "block"),
    "speed current, compiled": partial(speed, "current", compile=True),
    "speed delayed, no fusions": partial(speed, "delayed", fuse="none"),
}

TWO_GPUS = ("ddp", "fsdp2")
SETS: dict[str, Callable[[str], bool]] = {
    "checks": lambda name: not name.startswith("speed") and name not in TWO_GPUS,
    "two-gpus": lambda name: name in TWO_GPUS,
    "speed": lambda name: name.startswith("speed"),
}


def chosen_cases() -> dict[str, Callable[[], dict[str, Any]]]:
    """Return the cases of ``--set``, which is taken from the command line; without it, all."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--set", choices=SETS)
    options, sys.argv[1:] = parser.parse_known_args()
    return {name: run for name, run in CASES.items() if options.set is None or SETS[options.set](name)}


def without_engine(cases: Iterable[str]) -> list[str]:
    """Return those of the cases that can run here: all, or those that need no Transformer Engine.

    Raises:
        SystemExit: If it cannot be loaded, and nothing is left.
    """
    from lightning_ups._compat.optional.te import engine

    try:
        engine()
    except Exception as error:  # built for another torch or CUDA, it raises whatever it likes
        left = [name for name in cases if name.startswith("speed bf16")]
        why = portable(f"{type(error).__name__}: {error}".splitlines()[0])
        print(
            f"Transformer Engine cannot be loaded: {why}. Left without it: {', '.join(left) or 'nothing'}.", flush=True
        )
        if not left:
            raise SystemExit("Install Transformer Engine for this torch and CUDA.") from error
        return left
    return list(cases)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=UserWarning)
    cases = chosen_cases()
    if "--case" not in sys.argv and not {"-h", "--help"} & {*sys.argv}:
        cases = {name: cases[name] for name in without_engine(cases)}
        if cases.keys() <= {*TWO_GPUS} and torch.cuda.device_count() < 2:
            raise SystemExit(f"--set two-gpus needs 2 GPUs, and {torch.cuda.device_count()} are visible.")
    main(cases, columns=("ok", "failed", "num_checks", "tokens_s", "gib", "last_loss", "skipped", "error"))
