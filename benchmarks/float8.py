"""Float8 beside bfloat16 on one GPU: speed, losses, and what the advisor predicts against what is measured.

    python benchmarks/float8.py --set speed --output OUT          # the 1.5 B GPT, each precision, 30 steps
    python benchmarks/float8.py --set compiler --output OUT       # tensorwise, by other settings of inductor
    python benchmarks/float8.py --set losses --output OUT         # 300 steps on the standard library: bf16's band,
                                                                  # and the first of its runs, rounded another way
    python benchmarks/float8.py --set recipes --output OUT        # the same by each recipe of torchao
    python benchmarks/float8.py --set recipes-te --output OUT     # and of Transformer Engine
    python benchmarks/float8.py --set seeds --output OUT          # torchao's recipes from bf16's other seeds, too
    python benchmarks/float8.py --set hybrid --output OUT         # tensorwise with gradients in e5m2: speed and losses
    python benchmarks/float8.py --set losses-8B --output OUT      # tensorwise and hybrid beside bf16: 8 B on two GPUs
    python benchmarks/float8.py --set predict-gpt --output OUT    # what float8 would gain for two models, and
    python benchmarks/float8.py --set predict-other --output OUT  # for two more; commit OUT now
    python benchmarks/float8.py --set predict-narrow --output OUT # for one in which it should lose
    python benchmarks/float8.py --set measure-gpt --output OUT    # two of them: bfloat16, all in float8, filter: auto
    python benchmarks/float8.py --set measure-other --output OUT  # the other two
    python benchmarks/float8.py --set measure-narrow --output OUT # the last
    python benchmarks/float8.py --summary     --output OUT    # tables of whatever is in OUT
    python benchmarks/float8.py --set all --tiny --output OUT # the same code on a CPU, with made-up times of products

Each configuration runs in a process of its own, prints one line of JSON, and is kept as OUT/NAME.json at once. What is
there already is not run again, so that a set may be spread over several calls, each with its --budget in seconds; on
another machine, copy what there is into OUT first. Sets that run at the same time, each on a GPU of its own by
CUDA_VISIBLE_DEVICES, have an OUT each. Times of products are kept in OUT/cache, so that `filter: auto` decides by those
of the predictions. To measure is refused without OUT's predictions, and so is an OUT with results of the other size or
another device. Transformer Engine takes part where it can be loaded. What cannot run is said before anything does.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from cases import add_to, keep, left_on_device, prepare, unloadable, unmet_gpus
from processes import Interrupted, finished, result_of

FLOAT8 = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
ENGINE = ("delayed", "current", "block")
MODELS = ("1B", "150M", "vit", "mixed", "narrow")
SEEDS = (0, 1, 2)
SHARDS = 2  # GPUs that share the model of 8 B
SETTINGS = {  # functions that return what holds while it is open
    "tuned": "lightning_ups._compat.torch.compile.inductor.tuned_blocks",
    "combined": "lightning_ups._compat.torch.compile.inductor.combined_kernels",
}
HYBRID = "tensorwise hybrid"  # as torchao has it: gradients in e5m2
SETS: Mapping[str, Callable[[str], bool]] = {  # each is done in well under ten minutes of one GPU
    "speed": lambda name: name.startswith("speed") and not name.endswith((*SETTINGS, HYBRID)),
    "compiler": lambda name: name.startswith("speed") and name.endswith(tuple(SETTINGS)),
    "losses": lambda name: name.startswith("losses bf16") or name == "losses autocast seed 0",
    "recipes": lambda name: name in {f"losses {recipe} seed 0" for recipe in FLOAT8},
    "recipes-te": lambda name: name.startswith("losses te "),
    "seeds": lambda name: (
        name in {f"losses {other} seed {seed}" for other in ("autocast", *FLOAT8) for seed in SEEDS[1:]}
    ),
    "hybrid": lambda name: name == f"speed {HYBRID}" or name.startswith(f"losses {HYBRID}"),
    "losses-8B": lambda name: name.startswith("losses 8B "),
    "predict-gpt": lambda name: name.startswith(("predict 1B", "predict 150M")),
    "predict-other": lambda name: name.startswith(("predict vit", "predict mixed")),
    "predict-narrow": lambda name: name == "predict narrow",
    "measure-gpt": lambda name: name.startswith(("measure 1B", "measure 150M")),
    "measure-other": lambda name: name.startswith(("measure vit", "measure mixed")),
    "measure-narrow": lambda name: name.startswith("measure narrow"),
}


def main() -> int:
    """Run a set of configurations, or one of them, or print what there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=[*SETS, "all"], default="all")
    parser.add_argument("--only", default="", help="run the configurations whose name contains this")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=540, help="seconds for everything")
    parser.add_argument("--timeout", type=float, default=240, help="seconds for each configuration")
    parser.add_argument("--tiny", action="store_true", help="small enough for a CPU")
    parser.add_argument("--summary", action="store_true")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        found = _cases(tiny=options.tiny, output=options.output)[options.case]()
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print("\nRESULT " + json.dumps(found), flush=True)
        return 0
    if options.summary:
        print(*_summary(options.output), sep="\n")
        return 0
    names = _chosen(options)
    prepare(parser, options.output)
    try:
        _run(options, names)
    finally:  # also when it is interrupted
        print(*_summary(options.output), sep="\n", flush=True)
    return 0


def _cases(*, tiny: bool, output: Path) -> dict[str, Callable[[], dict[str, Any]]]:
    engine = [f"te {name}" for name in ENGINE] if find_spec("transformer_engine") is not None else []
    cases: dict[str, Callable[[], dict[str, Any]]] = {}
    for name in ("bf16", *FLOAT8, *engine):
        cases[f"speed {name}"] = partial(speed, name, tiny=tiny)
    for setting in SETTINGS:
        cases[f"speed tensorwise {setting}"] = partial(speed, "tensorwise", setting=setting, tiny=tiny)
    for seed in SEEDS:
        cases[f"losses bf16 seed {seed}"] = partial(losses, "bf16", seed=seed, tiny=tiny)
    for name in ("autocast", *FLOAT8, *engine):
        cases[f"losses {name} seed 0"] = partial(losses, name, seed=0, tiny=tiny)
    if engine:  # with gradients as `tensorwise` has them, too
        cases["losses te current e4m3 seed 0"] = partial(losses, "te current e4m3", seed=0, tiny=tiny)
    for seed in SEEDS[1:]:
        for name in ("autocast", *reversed(FLOAT8)):
            cases[f"losses {name} seed {seed}"] = partial(losses, name, seed=seed, tiny=tiny)
    cases[f"speed {HYBRID}"] = partial(speed, HYBRID, tiny=tiny)
    for seed in SEEDS:
        cases[f"losses {HYBRID} seed {seed}"] = partial(losses, HYBRID, seed=seed, tiny=tiny)
        for name in ("bf16", "tensorwise", HYBRID):
            cases[f"losses 8B {name} seed {seed}"] = partial(losses_sharded, name, seed=seed, tiny=tiny)
    for model in MODELS:
        cases[f"predict {model}"] = partial(predict, model, tiny=tiny)
    for model in MODELS:
        for name in ("bf16", "tensorwise", "auto"):
            cases[f"measure {model} {name}"] = partial(measure, model, name, tiny=tiny, output=output)
    return cases


def _chosen(options: argparse.Namespace) -> list[str]:
    """Return the configurations that are asked for and not there yet.

    Raises:
        SystemExit: If it is known that they cannot run, or would not fit together.
    """
    asked = [
        name
        for name in _cases(tiny=options.tiny, output=options.output)
        if (options.set == "all" or SETS[options.set](name)) and options.only in name
    ]
    if not asked:
        hint = " Is Transformer Engine installed?" if "te" in f"{options.set} {options.only}" else ""
        raise SystemExit(f"No configuration of --set {options.set} has {options.only!r} in its name.{hint}")
    if other := _others(options.output, {"tiny": options.tiny, "device": _device()}):
        raise SystemExit(f"{other} Speeds of two kinds make no table. Give another --output.")
    names = [name for name in asked if not _path(options.output, name).exists()]
    for name in [name for name in asked if name not in names]:
        print(f"{name}: is there", flush=True)
    return _possible(names, tiny=options.tiny, output=options.output)


def _possible(names: Sequence[str], *, tiny: bool, output: Path) -> list[str]:
    for name in names:
        model = name.split()[1]
        if name.startswith("measure") and not _path(output, f"predict {model}").exists():
            predicted = any(other == f"predict {model}" for other in names[: names.index(name)])
            if not predicted:
                raise SystemExit(
                    f"Nothing is predicted for {model} yet. Run its --set predict-... first, and commit what it wrote."
                )
    ours = [name for name in names if not any(other in name for other in ("bf16", "autocast", " te "))]
    if ours and (lack := unloadable("torchao.float8", what=repr(ours[0]))):
        raise SystemExit(f"{lack}. Install it for this torch.")
    images = [name for name in names if " vit" in name]
    if images and not tiny and (lack := unloadable("timm", what=repr(images[0]))):
        raise SystemExit(f"{lack}. Install it, or use --only.")
    theirs = [name for name in names if " te " in name]
    if theirs and (lack := unloadable("transformer_engine", what=repr(theirs[0]), load=_engine)):
        names = _left(names, theirs, lack, cure="Install Transformer Engine for this torch and CUDA.")
    sharded = [name for name in names if _ranks(name) > 1]
    if sharded and not tiny and (lack := unmet_gpus(SHARDS, what=repr(sharded[0]))):
        names = _left(names, sharded, lack, cure="Use a machine that has them.")
    return list(names)


def _left(names: Sequence[str], out: Sequence[str], lack: str, *, cure: str) -> list[str]:
    print(f"{lack}: left out, with {len(out) - 1} others", flush=True)
    if left := [name for name in names if name not in out]:
        return left
    raise SystemExit(f"Nothing is left to run. {cure}")


def _engine(_: str) -> Any:
    from lightning_ups._compat.optional.te import engine

    return engine()


def _device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def _others(output: Path, here: Mapping[str, Any]) -> str | None:
    """Return which result in ``output`` is of another kind than what would be run."""
    for name, found in _found(output).items():
        for key, value in here.items():
            if isinstance(found, dict) and key in found and found[key] != value:
                return f"{name}.json in --output has {key} {found[key]!r}, and this would have {value!r}."
    return None


def _run(options: argparse.Namespace, names: Sequence[str]) -> None:
    start = time.monotonic()
    here = {"tiny": options.tiny, "device": _device()}
    least = 5 if options.tiny else 60  # in less time no configuration gets to its end
    for name in names:
        left = options.budget - (time.monotonic() - start)
        if left < least:
            print(f"{name}: left out, the budget is spent", flush=True)
            continue
        result = _child(name, options, timeout_s=min(options.timeout, left))
        print(json.dumps({"case": name, **result}), flush=True)
        _keep(_path(options.output, name), {**result, **here})


def _child(name: str, options: argparse.Namespace, *, timeout_s: float) -> dict[str, Any]:
    words = ["--case", name, "--output", str(options.output), *(["--tiny"] if options.tiny else [])]
    cache = {"XDG_CACHE_HOME": str((options.output / "cache").resolve())}
    began, log = time.monotonic(), options.output / "log.txt"
    try:
        text = finished([sys.executable, __file__, *words], timeout=timeout_s, ranks=_ranks(name), environment=cache)
    except Interrupted as error:
        add_to(log, f"===== {name}\n{error.said}\ninterrupted\n")
        raise
    add_to(log, f"===== {name}\n{text}\n")
    return result_of(text) | {"seconds_in_all": round(time.monotonic() - began, 1)}


def _ranks(name: str) -> int:
    return SHARDS if SETS["losses-8B"](name) else 1


def _keep(path: Path, result: Mapping[str, Any]) -> None:
    failed = path.with_suffix(".failed")
    if "error" in result:
        keep(failed, result)
        return
    keep(path, result)
    failed.unlink(missing_ok=True)


def _path(output: Path, name: str) -> Path:
    return output / f"{name.replace(' ', '_')}.json"


# What is run


def precision(name: str, *, tiny: bool) -> Any:
    """Return a precision by its name here."""
    from lightning_ups.precision import BF16Precision, Float8Precision, TEPrecision

    if name == "bf16":
        return BF16Precision(weights="masters")
    if name == "autocast":
        return BF16Precision(weights="autocast")
    if name.startswith("te "):
        recipe, *own = name.removeprefix("te ").split()
        more: dict[str, Any] = {"amax_history": 16} if recipe == "delayed" else {}
        return TEPrecision(recipe=recipe, number_format=(*own, None)[0], weights="masters", **more)  # type: ignore[arg-type]
    if name == "auto":
        chosen = Float8Precision(filter="auto", weights="masters", emulate=tiny)
        chosen.timer = _made_up if tiny else None
        return chosen
    recipe, *hybrid = name.split()
    return Float8Precision(recipe=recipe, number_format=(*hybrid, "e4m3")[0], weights="masters", emulate=tiny)  # type: ignore[arg-type]


def speed(name: str, *, tiny: bool, setting: str | None = None) -> dict[str, Any]:
    """Return tokens a second and peak memory of the 1.5 B GPT, of 30 steps of which the first ten do not count."""
    steps, seq, batch = (6, 32, 2) if tiny else (30, 4096, 4)
    module, data = gpt("tiny" if tiny else "1B", seq=seq, batch=batch)
    with nullcontext() if setting is None else resolve_name(SETTINGS[setting])():
        found = _fit(module, data, precision(name, tiny=tiny), steps=steps, warmup=steps // 3, compiled=not tiny)
    return found | {"tokens_per_s": round(1000 * seq * batch / found["step_ms"], 1)}


def losses(name: str, *, seed: int, tiny: bool) -> dict[str, Any]:
    """Return the losses of 300 steps on the standard library's source."""
    from lightning_ups.data import StdlibText
    from lightning_ups.models import GPTModule

    steps, seq, batch = (6, 32, 2) if tiny else (300, 1024, 8)
    module = GPTModule(size="tiny" if tiny else "1B", vocab_size=256, max_seq_len=seq, warmup_steps=steps // 10)
    data = StdlibText(seq_len=seq, batch_size=batch, seed=seed)
    return _with_end(
        _fit(module, data, precision(name, tiny=tiny), steps=steps, warmup=steps // 3, compiled=not tiny, seed=seed)
    )


def losses_sharded(name: str, *, seed: int, tiny: bool) -> dict[str, Any]:
    """Return the same of Llama 3's shape of 8 B, which GPUs share, with a batch of one sequence of 2048 on each.

    All but products is computed again in the backward pass, so that GPUs of 80 GB have room.
    """
    from lightning_ups.callbacks import ActivationCheckpoint
    from lightning_ups.data import StdlibText
    from lightning_ups.models import GPTModule
    from lightning_ups.strategies import FSDP2Strategy

    steps, seq = (6, 32) if tiny else (300, 2048)
    module = GPTModule(size="tiny" if tiny else "8B", max_seq_len=seq, warmup_steps=steps // 10)
    found = _fit(
        module, StdlibText(seq_len=seq, batch_size=1, seed=seed), precision(name, tiny=tiny), steps=steps,
        warmup=steps // 3, compiled=not tiny, seed=seed, callbacks=[ActivationCheckpoint(save="matmuls")],
        strategy=FSDP2Strategy(meta_device=True, initialise_on="device"), devices=SHARDS,
    )  # fmt: skip
    return _with_end(found)


def _with_end(found: dict[str, Any]) -> dict[str, Any]:
    tail = found["losses"][-len(found["losses"]) // 10 :]
    return found | {"last_tenth": sum(tail) / len(tail)}


def predict(model: str, *, tiny: bool) -> dict[str, Any]:
    """Return what the advisor says of a model, before anything of it runs in float8."""
    from lightning_ups.commands.advise import advise
    from lightning_ups.commands.trial import Trial

    trial: Trial = _trial(model, tiny=tiny)
    (advice,) = advise(trial, recipes=["tensorwise"], steps=8 if tiny else 25, timer=_made_up if tiny else None)
    return {
        "step_ms": advice.step_ms,
        "products_ms": advice.products_ms,
        "gain_all": advice.gain(advice.layers),
        "gain_auto": advice.gain(advice.winners),
        "converts": [layer.name for layer in advice.winners],
        "of": len(advice.layers),
        "verdict": advice.verdict(),
        "table": [dict(row) for row in advice.rows(["tensorwise"])],
    }


def profile(model: str, name: str, *, tiny: bool, callback: Any) -> None:
    """Train a model in one precision, compiled as it is measured, until a callback that looks on says to stop."""
    module, data = _model(model, tiny=tiny)
    chosen = precision(name, tiny=tiny)
    _fit(module, data, chosen, steps=40, warmup=2, compiled=not tiny, callbacks=[callback])


def measure(model: str, name: str, *, tiny: bool, output: Path) -> dict[str, Any]:
    """Return the time of a step of a model in one precision; only once there is a prediction of it."""
    if not _path(output, f"predict {model}").exists():
        raise SystemExit(
            f"Nothing is predicted for {model} yet. Run its --set predict-... first, and commit what it wrote."
        )
    module, data = _model(model, tiny=tiny)
    steps = 6 if tiny else 40
    return _fit(module, data, precision(name, tiny=tiny), steps=steps, warmup=steps // 4, compiled=not tiny)


def _fit(
    module: Any, data: Any, chosen: Any, *, steps: int, warmup: int, compiled: bool, seed: int = 0,
    callbacks: Sequence[Any] = (), strategy: Any = "auto", devices: int = 1,
) -> dict[str, Any]:  # fmt: skip
    import torch
    from lightning.pytorch import Callback, Trainer, seed_everything

    from lightning_ups.commands.trial import StepClock

    class Losses(Callback):
        """Keeps them on the device: to read one would wait for it."""

        def __init__(self) -> None:
            self.found: list[Any] = []
            self.converted = 0

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # later a sharded module alone knows it
            conversion = getattr(trainer.precision_plugin, "conversion", None)
            self.converted = len(getattr(conversion, "converted", ()))

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any, **__: Any) -> None:
            self.found.append(outputs["loss"].detach())

    clock, kept, cuda = StepClock(warmup=warmup), Losses(), torch.cuda.is_available()
    seed_everything(seed, verbose=False)
    trainer = Trainer(
        accelerator="cuda" if cuda else "cpu", devices=devices, strategy=strategy, max_steps=steps,
        plugins=[chosen],
        callbacks=[*_compiled(chosen, compiled=compiled, whole=devices == 1), clock, kept, *callbacks], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
        num_sanity_val_steps=0,
    )  # fmt: skip
    with left_on_device(module):
        trainer.fit(module, data)
    # Over ranks, each of which has its own batches.
    found = trainer.strategy.reduce(torch.stack(kept.found).float(), reduce_op="mean")
    return {
        "step_ms": clock.step_ms,
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if cuda else None,
        "converted": kept.converted,
        "losses": [round(loss, 5) for loss in found.tolist()],
    }


def _compiled(chosen: Any, *, compiled: bool, whole: bool = True) -> list[Any]:
    """Return what compiles beside a precision: by blocks what breaks graphs, and nothing where that is refused."""
    from lightning_ups.callbacks import Compile
    from lightning_ups.order.capabilities import capabilities_of
    from lightning_ups.precision import TEPrecision

    if not compiled or capabilities_of(chosen).excludes_compile:
        return []
    return [Compile(scope="model" if whole and not isinstance(chosen, TEPrecision) else "blocks")]


# Models


def gpt(size: Any, *, seq: int, batch: int) -> tuple[Any, Any]:
    """Return our GPT and random tokens for it."""
    from lightning_ups.data import RandomTokens
    from lightning_ups.models import GPTModule
    from lightning_ups.models.gpt import SIZES

    module = GPTModule(size=size, max_seq_len=seq, schedule="constant", warmup_steps=5)
    return module, RandomTokens(vocab_size=SIZES[size].vocab_size, seq_len=seq, batch_size=batch)


def _model(name: str, *, tiny: bool) -> tuple[Any, Any]:
    import torch

    torch.manual_seed(0)
    if name in ("1B", "150M"):
        size, seq, batch = ("tiny", 32, 2) if tiny else (name, 4096, 4) if name == "1B" else (name, 1024, 32)
        return gpt(size, seq=seq, batch=batch)
    return {"vit": vit, "mixed": mixed, "narrow": narrow}[name](tiny=tiny)


def vit(*, tiny: bool) -> tuple[Any, Any]:
    """Return timm's ViT-L, or, for a CPU, a plain one of torch's layers, and images."""
    import torch
    from torch import nn

    size, batch = (32, 2) if tiny else (224, 128)

    def build() -> nn.Module:
        if tiny:
            layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
            return nn.Sequential(
                nn.Flatten(2), nn.Linear(size * size, 32), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            )
        import timm  # pyright: ignore[reportMissingImports]

        return timm.create_model("vit_large_patch16_224", num_classes=1000)

    classes = 10 if tiny else 1000
    images = [(torch.randn(batch, 3, size, size), torch.randint(classes, (batch,))) for _ in range(2 if tiny else 4)]
    return _classifier(build, classes=classes if tiny else None, width=32), _repeated(images)


def mixed(*, tiny: bool) -> tuple[Any, Any]:
    """Return a model of narrow blocks, in which float8 gains little or loses, and wide ones, in which it wins."""
    from torch import nn

    less, more, rows, batch = (16, 64, 4, 4) if tiny else (512, 4096, 512, 32)

    def build() -> nn.Module:
        return nn.Sequential(_feeds(6, less), nn.Linear(less, more), _feeds(6, more))

    return _classifier(build, classes=10, width=more), _rows(batch, rows, less)


def narrow(*, tiny: bool) -> tuple[Any, Any]:
    """Return a model whose blocks are so narrow that casts should take longer than products save."""
    width, rows, batch = (16, 4, 4) if tiny else (256, 512, 512)
    return _classifier(partial(_feeds, 12, width), classes=10, width=width), _rows(batch, rows, width)


def _feeds(number: int, width: int) -> Any:
    import torch
    from torch import nn

    class Feed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = (
                nn.LayerNorm(width),
                nn.Linear(width, 2 * width),
                nn.Linear(2 * width, width),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

    return nn.Sequential(*(Feed() for _ in range(number)))


def _rows(batch: int, rows: int, width: int) -> Any:
    import torch

    return _repeated([(torch.randn(batch, rows, width), torch.randint(10, (batch,))) for _ in range(4)])


def _classifier(build: Callable[[], Any], *, classes: int | None, width: int) -> Any:
    import torch
    from lightning.pytorch import LightningModule
    from torch import nn

    class Classifier(LightningModule):
        """Classifies the mean over positions, where the network itself does not."""

        def __init__(self) -> None:
            super().__init__()
            self.net, self.head = build(), nn.Linear(width, classes) if classes else nn.Identity()

        def training_step(self, batch: Any, _: int) -> Any:
            x, target = batch
            features = self.net(x)
            return nn.functional.cross_entropy(self.head(features.mean(1) if classes else features), target)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=torch.cuda.is_available())

    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):  # where drawing takes no time
        return Classifier()


def _repeated(batches: list[tuple[Any, ...]]) -> Any:
    import torch
    from lightning.pytorch import LightningDataModule
    from torch.utils.data import DataLoader

    device = "cuda" if torch.cuda.is_available() else "cpu"
    there = [tuple(part.to(device) for part in batch) for batch in batches]

    class Repeated(LightningDataModule):
        """The same few batches over and over, on the device: to pin and to copy one takes as long as a narrow step."""

        def train_dataloader(self) -> Any:
            several: Any = [there[i % len(there)] for i in range(200)]
            return DataLoader(several, batch_size=None)

    return Repeated()


def _trial(model: str, *, tiny: bool) -> Any:
    import torch
    from lightning.pytorch.strategies import SingleDeviceStrategy

    from lightning_ups.callbacks import Compile
    from lightning_ups.commands.trial import Trial
    from lightning_ups.order import Placement, Run
    from lightning_ups.precision import BF16Precision

    module, data = _model(model, tiny=tiny)
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    callbacks = [] if tiny else [Compile(scope="model")]
    run = Run(
        module=module, strategy=Placement.of(SingleDeviceStrategy), callbacks=callbacks,
        precision=BF16Precision(weights="masters"), accelerator=kind, num_devices=1, num_nodes=1,
    )  # fmt: skip
    settings = {"accelerator": kind, "strategy": "auto", "plugins": None}
    return Trial(module=module, data=data, settings=settings, callbacks=callbacks, run=run, seed=0)


def _made_up(product: Any, recipe: str) -> Any:
    """Return times that follow from shapes: wide products win, narrow ones lose."""
    from lightning_ups.insight.advise import Times

    third = product.flops / 1e6  # nothing on any device: large enough to decide
    if recipe != "bfloat16":
        third *= 0.6 if product.in_features * product.out_features > 2**12 else 1.2
    return Times(forward_ms=third, dgrad_ms=third, wgrad_ms=third)


# What is said


def _found(output: Path) -> dict[str, Any]:
    kinds = ("speed_", "losses_", "predict_", "measure_")
    paths = [path for path in sorted(output.glob("*_*.json")) if path.name.startswith(kinds)]
    return {path.stem: json.loads(path.read_text()) for path in paths}


def _summary(output: Path) -> list[str]:
    found = _found(output)
    return [*_speeds(found), "", *_bands(found), *_predictions(found)]


def _speeds(found: Mapping[str, Any]) -> list[str]:
    rows = {name.removeprefix("speed_"): result for name, result in found.items() if name.startswith("speed_")}
    base = rows.get("bf16", {}).get("tokens_per_s")
    lines = ["| precision | tokens/s | to bf16 | peak GiB | layers | last loss |", "|---|---|---|---|---|---|"]
    for name, result in rows.items():
        ratio = f"{result['tokens_per_s'] / base:.3f}" if base else ""
        figures = (f"{result['tokens_per_s']:.0f}", ratio, result["peak_gib"], result["converted"])
        lines.append(f"| {name} | {' | '.join(map(str, figures))} | {result['losses'][-1]:.4f} |")
    return lines


def _bands(found: Mapping[str, Any]) -> list[str]:
    rows = {name.removeprefix("losses_"): result for name, result in found.items() if name.startswith("losses_")}
    large = {name: result for name, result in rows.items() if name.startswith("8B_")}
    small = {name: result for name, result in rows.items() if name not in large}
    return [line for some, bf16 in ((small, "bf16"), (large, "8B_bf16")) if some for line in (*_band(some, bf16), "")]


def _band(rows: Mapping[str, Any], bf16: str) -> list[str]:
    band = [result["last_tenth"] for name, result in rows.items() if name.startswith(bf16)]
    lines = ["| run | mean loss of the last tenth | to bf16's with its seed | within the band of bf16's seeds |"]
    lines.append("|---|---|---|---|")
    for name, result in rows.items():
        inside = min(band) <= result["last_tenth"] <= max(band) if len(band) == len(SEEDS) else "?"
        base = rows.get(f"{bf16}_seed_{name[-1]}", {}).get("last_tenth")
        more = f"{result['last_tenth'] - base:+.4f}" if base else "?"
        lines.append(f"| {name} | {result['last_tenth']:.4f} | {more} | {inside} |")
    if len(band) == len(SEEDS):
        lines.append(f"\nThe band: {min(band):.4f} to {max(band):.4f}")
    return lines


def _predictions(found: Mapping[str, Any]) -> list[str]:
    lines = [
        "| model | predicted, all | measured | predicted, auto | measured | within 5 points | auto to the better |",
        "|---|---|---|---|---|---|---|",
    ]
    for model in MODELS:
        said = found.get(f"predict_{model}")
        if said is None:
            continue
        steps = {
            name: found.get(f"measure_{model}_{name}", {}).get("step_ms") for name in ("bf16", "tensorwise", "auto")
        }
        base = steps["bf16"]
        gains = {name: base / step - 1 if base and step else None for name, step in steps.items()}
        predicted = {"tensorwise": said["gain_all"], "auto": said["gain_auto"]}
        apart = [abs(gain - predicted[name]) for name in predicted if (gain := gains[name]) is not None]
        near = (
            all(part <= 0.05 for part in apart)
            if len(apart) == len(predicted) or max(apart, default=0) > 0.05
            else None
        )
        known = [step for step in (base, steps["tensorwise"], steps["auto"]) if step]
        better = min(known[:2]) / known[2] - 1 if len(known) == 3 else None
        cells = (predicted["tensorwise"], gains["tensorwise"], predicted["auto"], gains["auto"])
        shown = [*map(_percent, cells), "" if near is None else str(near), _percent(better)]
        lines.append(f"| {model} | {' | '.join(shown)} |")
    return lines


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:+.1%}"


if __name__ == "__main__":
    sys.exit(main())
