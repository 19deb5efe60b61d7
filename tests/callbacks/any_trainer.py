"""Trainers drawn from a seed, and callbacks of ours among stock ones: a run with ours is the run without them.

What is drawn is a plain dictionary, so that a failing one can be printed, and made smaller part by part.
"""

import csv
import gc
import json
import logging
import os
import random
import re
import signal
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset

import lightning_ups.callbacks as ours
from lightning_ups._compat.contexts import only_from

WIDTH = 8


# The module and its data, as users write them.


class Net(LightningModule):
    def __init__(self, settings):
        super().__init__()
        if settings["hyperparameters"]:
            self.save_hyperparameters({"width": WIDTH, "settings": sorted(settings)})
        drop = nn.Dropout(0.2) if settings["dropout"] else nn.Identity()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), drop, nn.Linear(16, WIDTH)) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, 1)
        self.settings, self.calls, self.losses, self.validated = settings, 0, [], []
        self.automatic_optimization = not settings["manual"]

    def loss(self, batch):
        x = torch.cat([leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim() == 2])
        for layer in self.layers:
            x = x + layer(x)
        return (self.head(x) - x.mean(1, keepdim=True)).square().mean()

    def training_step(self, batch, batch_idx):
        self.calls += 1
        settings = self.settings
        if settings["skip"] and self.calls % settings["skip"] == 1:
            return None
        if settings["end"] and self.calls == settings["at"]:
            raise {"raise": RuntimeError("stop here"), "interrupt": KeyboardInterrupt()}[settings["end"]]
        loss = self.loss(batch)
        self.losses.append(loss.detach())
        self.log("train", loss, on_step=True, on_epoch=True, prog_bar=settings["bar"], batch_size=4)
        if settings["manual"]:
            return self.step_by_hand(loss)
        return {"loss": loss, "more": batch_idx} if settings["output"] == "dict" else loss

    def step_by_hand(self, loss):
        optimizers = self.optimizers()
        optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        schedulers = self.lr_schedulers() or []
        for scheduler in schedulers if isinstance(schedulers, list) else [schedulers]:
            scheduler.step()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        loss = self.loss(batch)
        self.validated.append(loss.detach())
        self.log("val", loss, batch_size=4, add_dataloader_idx=False)

    def configure_optimizers(self):
        settings = self.settings
        parts = [self.layers, self.head] if settings["optimizers"] == 2 else [self]
        made = [OPTIMIZERS[settings["optimizer"]](part.parameters()) for part in parts]
        if not settings["scheduler"]:
            return made
        schedulers = [{"scheduler": torch.optim.lr_scheduler.StepLR(each, 1, 0.9)} for each in made]
        return made, [each | {"interval": settings["scheduler"]} for each in schedulers]

    def generate(self, tokens, *, num_tokens, temperature, top_k, seed):
        self.layers[0](torch.zeros(1, WIDTH))
        return torch.cat([tokens, tokens[:, :1].expand(-1, num_tokens)], 1)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
}


class Rows(IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


class Data(LightningDataModule):
    """Loaders of every kind, and what a text sample asks for."""

    unigram_entropy = 2.0

    def __init__(self, settings):
        super().__init__()
        self.settings = settings

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(5)
        num, kind = self.settings["rows"], self.settings["data"]
        rows = torch.randn(num, WIDTH, generator=generator)
        if kind == "iterable":
            return DataLoader(Rows(rows), batch_size=4)
        if kind in ("sized", "shuffled"):
            return DataLoader(rows, batch_size=4, shuffle=kind == "shuffled")
        both = {"a": DataLoader(rows, batch_size=4, shuffle=True), "b": DataLoader(rows[: num // 2], batch_size=3)}
        return both if kind == "dict" else CombinedLoader(both, kind)

    def val_dataloader(self):
        rows = torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(6))
        return [DataLoader(rows, batch_size=size) for size in (4, 3)[: self.settings["val loaders"]]]

    def encode(self, text):
        return [ord(c) % WIDTH for c in text]

    def decode(self, tokens):
        return " ".join(map(str, tokens))


# Drawing


def draw(seed, *, ranks=False):
    """Return a Trainer's settings, its callbacks, and what becomes of the run."""
    rng = random.Random(seed)
    manual = rng.random() < 0.15
    val_loaders = rng.choice([0, 1, 1, 2])
    settings = {
        "dropout": rng.random() < 0.4,
        "hyperparameters": rng.random() < 0.3,
        "manual": manual,
        "optimizers": rng.choice([1, 2]) if manual else 1,
        "optimizer": rng.choice([*OPTIMIZERS]),
        "scheduler": rng.choice([None, "step", "epoch"]),
        "skip": rng.choice([0, 0, 0, 2, 3]),
        "end": rng.choice([None] * 6 + ["raise", "interrupt"]),
        "at": rng.randrange(1, 9),
        "output": rng.choice(["tensor", "dict"]),
        "bar": rng.random() < 0.5,
        "data": rng.choice(["sized", "shuffled", "iterable", "dict", "min_size", "max_size", "sequential"]),
        "rows": rng.choice([13, 16, 22]),
        "val loaders": val_loaders,
        "story": rng.choice(["fit", "fit", "validate, fit", "fit, validate, fit", "resume", "resume"]),
    }
    trainer = {
        "accumulate_grad_batches": 1 if manual else rng.choice([1, 1, 2, 3]),
        "gradient_clip_val": None if manual else rng.choice([None, 0.1]),
        "gradient_clip_algorithm": None if manual or ranks else rng.choice([None, "norm", "value"]),
        "log_every_n_steps": rng.choice([1, 2, 50]),
        "num_sanity_val_steps": rng.choice([0, 1, 2, -1]),
        "check_val_every_n_epoch": rng.choice([1, 1, 2]),
        "limit_train_batches": rng.choice([None, None, 2, 3]),
        "limit_val_batches": rng.choice([None, None, 1, 0]),
        "val_check_interval": rng.choice([None, None, 0.5, 2]),
        **rng.choice([{"max_epochs": n} for n in (1, 2, 3)] + [{"max_steps": n} for n in (3, 5, 7)]),
    }
    if settings["data"] == "iterable" and trainer["val_check_interval"] == 0.5:
        trainer["val_check_interval"] = 1
    if trainer["val_check_interval"] == 2 and rng.random() < 0.5:
        trainer["check_val_every_n_epoch"] = None
    if ranks or trainer["limit_train_batches"] is None:
        settings["rows"] = rng.choice([16, 24]) if ranks else settings["rows"]
    settings["loggers"] = rng.choice([[], ["csv"], ["csv"], ["tensorboard"], ["csv", "tensorboard"]])
    callbacks = _stock(rng, settings, trainer) + _ours(rng, settings, ranks=ranks)
    rng.shuffle(callbacks)
    return {"settings": settings, "trainer": trainer, "callbacks": callbacks}


def _stock(rng, settings, trainer):
    kinds = [{"every_n_train_steps": 2}, {"train_time_interval": 0}, {"every_n_epochs": 1}, {}]
    options = rng.choice(kinds) | {"save_last": rng.choice([None, True]), "save_top_k": rng.choice([-1, 1])}
    found = [["ModelCheckpoint", options]] if rng.random() < 0.7 or settings["story"] == "resume" else []
    if rng.random() < 0.3:
        found.append(["EarlyStopping", {"monitor": "train", "patience": rng.choice([0, 1]), "min_delta": 0.05}])
    if settings["loggers"] and rng.random() < 0.5:
        found.append(["LearningRateMonitor", {"logging_interval": rng.choice([None, "step", "epoch"])}])
    averages = not settings["manual"] and "max_epochs" in trainer and trainer["max_epochs"] > 1
    if averages and settings["story"] == "fit" and rng.random() < 0.3:
        found.append(["StochasticWeightAveraging", {"swa_lrs": 0.01, "swa_epoch_start": 1, "annealing_epochs": 1}])
    return found


def _ours(rng, settings, *, ranks):
    rollback = settings["story"] == "resume" and rng.random() < 0.5
    guard = {"on_nonfinite": "rollback" if rollback else "skip", "warmup_steps": 1, "window": 2, "sigmas": 0.5}
    can = [
        ["Compile", {"backend": rng.choice(["eager", "aot_eager"]), "scope": "blocks"}],
        ["ActivationCheckpoint", {"save": rng.choice(["nothing", "matmuls"])}],
        ["ActivationOffload", {"min_mb": 0, "every_k": rng.choice([1, 2])}],
        ["OptimizerOffload", {"update": rng.choice(["device", "host"]), "chunk_mb": 0.001}],
        ["ExactResume", {}],
        ["TokenThroughput", {"warmup_steps": rng.choice([0, 1]), "peak_tflops": rng.choice([None, 1.0])}],
        ["TrainingReport", {"pictures": False}],
        ["RunManifest", {"log_hyperparams": rng.random() < 0.7}],
        ["MemoryForensics", {"plan": rng.random() < 0.5}],
        ["LeanProgressBar", {"refresh_rate": rng.choice([1, 2])}],
        ["DevicePrefetch", {}],
        ["AccelerationFlags", {"gc_interval": rng.choice([None, 2]), "tf32": rng.choice([None, True])}],
        ["TextSample", {"num_tokens": 3}],
        ["UnigramBaseline", {"metric": "val"}],
    ]
    if not settings["manual"] or rng.random() < 0.2:  # which it refuses
        can.append(["StepGuard", guard])
    if ranks:
        can = [each for each in can if each[0] not in ("TextSample",)]
    return [each for each in can if rng.random() < 0.45]


STOCK = {
    "ModelCheckpoint": ModelCheckpoint,
    "EarlyStopping": EarlyStopping,
    "LearningRateMonitor": LearningRateMonitor,
    "StochasticWeightAveraging": StochasticWeightAveraging,
}


def made(name, options, root):
    if name == "ModelCheckpoint":
        options = {"filename": "{epoch}-{step}", **options}
        if "train_time_interval" in options:
            options["train_time_interval"] = timedelta(seconds=options["train_time_interval"])
        return ModelCheckpoint(root / "saved", **options)
    return STOCK[name](**options) if name in STOCK else getattr(ours, name)(**options)


# Running


def run(drawn, root, *, with_ours, strategy=None):
    """Run what was drawn; return all that can be seen of it, as plain values."""
    settings = drawn["settings"]
    names = set(STOCK) | ({"ExactResume"} if settings["story"] == "resume" else set())
    chosen = [each for each in drawn["callbacks"] if with_ours or each[0] in names]
    seed_everything(3, verbose=False)
    before = world()
    with only_from(logging.ERROR, "lightning.pytorch"), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        filters = [*warnings.filters]
        seen = _told(drawn, chosen, root, strategy)
        seen["filters"] = [str(each) for each in warnings.filters if each not in filters]
    said = {f"{w.category.__name__}: {w.message}".replace(str(root), "ROOT") for w in warned}
    seen["warned"] = sorted(re.sub(" at 0x[0-9a-f]+", "", each) for each in said)
    gc.collect()
    after = world()
    # What is imported meanwhile adds loggers and functions; what was there before stays as it was.
    seen["world"] = [
        f"{name} {part}: {was} > {after[name].get(part)}"
        for name, parts in before.items()
        for part, was in parts.items()
        if was != after[name].get(part) and not _by_dynamo(part, after[name].get(part))
    ]
    seen["files"] = sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())
    return seen


def _by_dynamo(part, value):
    """Return whether torch's compiler did this, which it does once and for the process."""
    return part == "torch.__trace" or str(getattr(value, "__module__", "")).startswith("torch._dynamo")


def _told(drawn, chosen, root, strategy):
    story, trainer, seen = drawn["settings"]["story"], None, {"errors": []}
    model, data = Net(drawn["settings"]), Data(drawn["settings"])
    for number, act in enumerate({"resume": "fit, resume"}.get(story, story).split(", ")):
        if act == "resume":
            callback = trainer.checkpoint_callback
            path = callback.last_model_path or callback.best_model_path
            if not path:
                break
            model = Net(drawn["settings"] | {"end": None})
            lengthen(drawn := json.loads(json.dumps(drawn)))
            trainer = None
        if trainer is None:
            trainer = Trainer(**_options(drawn, chosen, root, strategy))
        elif act == "fit" and number > 1:
            trainer.fit_loop.max_epochs = (trainer.fit_loop.max_epochs or 0) + 1
        try:
            if act == "validate":
                trainer.validate(model, data, verbose=False)
            elif act == "resume":
                trainer.fit(model, datamodule=data, ckpt_path=path, weights_only=False)
            else:
                trainer.fit(model, data)
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001  (what was drawn, or to be compared)
            seen["errors"].append(f"{type(error).__name__}: {error}".replace(str(root), "ROOT"))
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if strategy is not None:
            dist.barrier()  # the first rank may still be writing what the others are to read
        seen[f"{number} {act}"] = looked_at(trainer, model)
    seen["saved"] = {p.name: contents(p, root) for p in sorted((root / "saved").glob("*.ckpt"))}
    seen["logged"] = [logged(path) for path in sorted(root.rglob("metrics.csv"))]
    return seen


def lengthen(drawn):
    options = drawn["trainer"]
    for name in ("max_epochs", "max_steps"):
        if name in options:
            options[name] += 2
    drawn["settings"]["end"] = None


def _options(drawn, chosen, root, strategy):
    settings = drawn["settings"]
    makers = {"csv": CSVLogger, "tensorboard": TensorBoardLogger}
    has = {name for name, _ in chosen}
    return {
        **{name: value for name, value in drawn["trainer"].items() if value is not None},
        "check_val_every_n_epoch": drawn["trainer"]["check_val_every_n_epoch"],
        "accelerator": "cpu",
        "devices": 1 if strategy is None else dist.get_world_size(),
        "strategy": "auto" if strategy is None else strategy(),
        "logger": [makers[name](root, name=name) for name in settings["loggers"]],
        "callbacks": [made(name, options, root) for name, options in chosen],
        "default_root_dir": root,
        "enable_progress_bar": "LeanProgressBar" in has,
        "enable_model_summary": False,
        "enable_checkpointing": "ModelCheckpoint" in has,
    }


# Looking


def looked_at(trainer, model):
    """Return what a run came to, and what it left on everything that it had in hand."""
    return {
        "losses": [value.item() for value in model.losses],
        "validated": [value.item() for value in model.validated],
        "weights": {name: whole(p) for name, p in model.state_dict().items()},
        "steps": (trainer.global_step, trainer.current_epoch, model.calls),
        "random": (torch.get_rng_state(), random.getstate()),
        "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()},
        "training": [module.training for module in model.modules()],
        "left": left(trainer, model),
    }


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def left(trainer, model):
    """Return the attributes of a run's objects, by what kind of thing each is."""
    things = {f"module {name}": module for name, module in model.named_modules()}
    things |= {f"parameter {name}": p for name, p in model.named_parameters()}
    things |= {f"optimizer {i}": each for i, each in enumerate(trainer.optimizers)}
    things |= {f"scheduler {i}": each.scheduler for i, each in enumerate(trainer.lr_scheduler_configs)}
    for each in trainer.loggers:
        _ = each.version  # chosen when a logger is first asked, as by any progress bar: ours may be the only one
    things |= {f"logger {i}": each for i, each in enumerate(trainer.loggers)}
    things |= {f"stock {type(each).__name__}": each for each in trainer.callbacks if type(each).__name__ in STOCK}
    things |= {"trainer": trainer, "strategy": trainer.strategy, "profiler": trainer.profiler}
    things |= {"precision": trainer.precision_plugin, "data": trainer.datamodule, "fit loop": trainer.fit_loop}
    things |= {"epoch loop": trainer.fit_loop.epoch_loop, "validation loop": trainer.fit_loop.epoch_loop.val_loop}
    things |= {"validate loop": trainer.validate_loop}
    things |= {f"connector {name}": getattr(trainer, name) for name in vars(trainer) if name.endswith("_connector")}
    loaders = tree_leaves(getattr(trainer.train_dataloader, "iterables", trainer.train_dataloader))
    things |= {f"loader {i}": each for i, each in enumerate(loaders)}
    return {name: {"": kind(thing)} | _attributes(thing) for name, thing in things.items()}


def _attributes(thing):
    found = {name: kind(value) for name, value in getattr(thing, "__dict__", {}).items()}
    # Notes of torch's: that a weight stays where it is, and that an optimizer stepped before its scheduler.
    return {name: value for name, value in found.items() if name not in ("_dynamo_static_input_type", "_opt_called")}


def kind(value):
    """Return what kind of thing ``value`` is; of a function its name, of hooks how many."""
    if callable(value) and hasattr(value, "__qualname__"):
        return value.__qualname__
    name = type(value).__qualname__
    return f"{name} of {len(value)}" if name in ("OrderedDict", "WeakSet") else name


def contents(path, root):
    """Return a checkpoint without what is ours, and without where it lies."""
    saved = torch.load(path, weights_only=False) if path.is_file() else {"folder": sorted(os.listdir(path))}
    saved = {name: value for name, value in saved.items() if not name.startswith("lightning_ups")}
    mine = tuple(f"{name}" for name in ours.__all__)
    if "callbacks" in saved:
        saved["callbacks"] = {n: value for n, value in saved["callbacks"].items() if not n.startswith(mine)}
    return _placeless(saved, str(root))


def _placeless(value, root):
    if isinstance(value, dict):
        return {_placeless(k, root): _placeless(v, root) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_placeless(each, root) for each in value) if type(value) in (list, tuple) else value
    return str(value).replace(root, "ROOT") if isinstance(value, (str, Path)) else value


OURS_LOGGED = ("throughput/", "guard/", "gpu/", "checkpoint/")


def logged(path):
    """Return the rows of a CSV file without what ours log."""
    with path.open() as file:
        rows = [{k: v for k, v in row.items() if v and not k.startswith(OURS_LOGGED)} for row in csv.DictReader(file)]
    return [row for row in rows if row.keys() - {"step", "epoch"}]


def world():
    """Return what belongs to the process and not to a run."""
    from torch.nn.modules import module

    dynamo = sys.modules.get("torch._dynamo.config")
    loggers = [logging.root, *(each for each in logging.root.manager.loggerDict.values() if hasattr(each, "handlers"))]
    found = {
        "collection": (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count() > 0, len(gc.callbacks)),
        "signals": {s: signal.getsignal(s) for s in signal.valid_signals()},
        "hooks": (sys.excepthook, sys.unraisablehook, sys.displayhook),
        "streams": (sys.stdout, sys.stderr),
        "loggers": {each.name: (each.level, [*each.handlers], [*each.filters], each.disabled) for each in loggers},
        "numbers": (
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_anomaly_enabled(),
            torch.get_num_threads(),
        ),
        "cuda": (
            torch.backends.cuda.matmul.allow_tf32,
            torch.backends.cudnn.allow_tf32,
            torch.backends.cudnn.benchmark,
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
        ),
        "modules": [{k: len(v)} for k, v in vars(module).items() if k.startswith("_global_") and isinstance(v, dict)],
        "dynamo": {
            name: str(getattr(dynamo, name))
            for name in ("optimize_ddp", "cache_size_limit", "suppress_errors")
            if dynamo is not None and hasattr(dynamo, name)
        },
        "patched": {
            f"{owner.__name__}.{name}": value
            for owner in (
                torch,
                torch.Tensor,
                torch.autograd,
                torch.nn.functional,
                torch.optim.Optimizer,
                nn.Module,
                DataLoader,
                Trainer,
                LightningModule,
                dist,
            )
            for name, value in vars(owner).items()
            if callable(value)
        },
        "variables": {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"},
    }
    return {name: parts if isinstance(parts, dict) else {"": parts} for name, parts in found.items()}


# Comparing

# Said by ours, in words that tell what to do: not a change, and nothing that stock Lightning would know.
MAY_WARN = (
    "UserWarning: A resumed run may differ",
    "UserWarning: ActivationCheckpoint had nothing to recompute in the first step",
)


def compare(drawn, path, strategy=None):
    """Return what is different in a run with our callbacks, in one line, or an empty string."""
    right = run(drawn, folder(path, "stock"), with_ours=False, strategy=strategy)
    mine = run(drawn, folder(path, "ours"), with_ours=True, strategy=strategy)
    found = _compared(drawn, mine, right)
    if strategy is not None:
        everyone = [""] * dist.get_world_size()
        dist.all_gather_object(everyone, found)
        found = next((each for each in everyone if each), "")
    return found


def folder(path, name):
    (path / name).mkdir(parents=True, exist_ok=True)
    return path / name


def _compared(drawn, mine, right):
    new = [error for error in mine["errors"] if error not in right["errors"]]
    if new and new[0].startswith("ValueError") and not mine["0 fit" if "0 fit" in mine else "0 validate"]["losses"]:
        return f"refused: {new[0]}"
    if warned := [w for w in mine["warned"] if w not in right["warned"] and not w.startswith(MAY_WARN)]:
        return f"warned: {warned}"
    stock = {**right, "filters": [] if drawn["settings"]["story"] == "resume" else right["filters"]}  # ours is in both
    for name in ("world", "filters"):
        if left_over := [each for each in mine[name] if each not in stock[name]]:
            return f"left in the process: {left_over}"
    for name, value in right.items():
        if name in ("files", "warned", "world", "filters"):
            continue
        if found := difference(mine.get(name), value, name):
            return found
    return _files(drawn, mine, right)


def _files(drawn, mine, right):
    if missing := set(right["files"]) - set(mine["files"]) - {f for f in right["files"] if "events.out" in f}:
        return f"files that are missing: {sorted(missing)}"
    names = {name for name, _ in drawn["callbacks"]}
    written = {name: sum(Path(f).name.startswith(name) for f in mine["files"]) for name in ("manifest", "report")}
    first_rank = not dist.is_initialized() or dist.get_rank() == 0
    for file, callback in (("manifest", "RunManifest"), ("report", "TrainingReport")):
        if first_rank and bool(written[file]) != (callback in names):
            return f"{callback} and {written[file]} files: {mine['files']}"
    return ""


def difference(mine, right, where):
    """Return where two values differ, bit for bit."""
    if isinstance(right, dict) and isinstance(mine, dict):
        if mine.keys() != right.keys():
            more, less = (sorted(map(str, a.keys() - b.keys())) for a, b in ((mine, right), (right, mine)))
            return f"{where}: {more} for {less}"
        return next((d for k in right if (d := difference(mine[k], right[k], f"{where} > {k}"))), "")
    if isinstance(right, (list, tuple)) and isinstance(mine, (list, tuple)):
        if len(mine) != len(right):
            return f"{where}: {len(mine)} for {len(right)}: {str(mine)[:300]} for {str(right)[:300]}"
        pairs = enumerate(zip(mine, right, strict=True))
        return next((d for i, (a, b) in pairs if (d := difference(a, b, f"{where} > {i}"))), "")
    if isinstance(right, Tensor) and isinstance(mine, Tensor):
        same = mine.dtype == right.dtype and mine.shape == right.shape and torch.equal(whole(mine), whole(right))
        return "" if same else f"{where}: tensors by {(mine.double() - right.double()).abs().max().item():.2g}"
    return "" if mine == right or (mine != mine and right != right) else f"{where}: {mine} for {right}"
