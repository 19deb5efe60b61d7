"""The runs of `tune_zoo.py`: modules of the zoo as users have them in a file for ``fit``, and the grid of settings.

The grid was committed before `tune` ran on a GPU, and is the same for each module.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Generator, Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override
from zoo_modules import load
from zoo_modules.base import DISTINCT, Work

__all__ = ["BUILDING", "GRID", "HELD_OUT", "Batches", "Whole", "micro_batch", "module", "run_yaml"]

BUILDING = ("llama", "gpt2", "bert", "timm_vit", "timm_convnext", "pde")
HELD_OUT = ("t5", "mixtral", "wav2vec2_ctc", "pyg_gat")  # not used while `tune` was built
MICRO_BATCHES = 2  # of an optimizer step; together they are the batch of the zoo

_ADAMW = "{class_path: torch.optim.AdamW, init_args: {lr: 3.0e-4}}"
_OPTIMIZERS = {"pyg_gat": "{class_path: torch.optim.Adam, init_args: {lr: 0.005, weight_decay: 5.0e-4}}"}


def module(name: str, tiny: bool = False) -> LightningModule:  # noqa: FBT001, FBT002  (set by YAML)
    """Return the module of a line."""
    return _work(name, tiny=tiny).module


class Batches(LightningDataModule):
    """Random samples that repeat, so that a model can learn them, in memory from which copies are quick.

    Args:
        name: The line.
        tiny: Whether at the size for a CPU.
        batch_size: Samples of a batch, at most those of the zoo.
    """

    def __init__(self, name: str, *, tiny: bool = False, batch_size: int) -> None:
        super().__init__()
        self.line, self.tiny, self.batch_size = name, tiny, batch_size

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        made = _made(_work(self.line, tiny=self.tiny))
        pool = tree_map(lambda *parts: torch.cat(parts), made[0], *made[1:])
        size = len(next(each for each in tree_leaves(pool) if isinstance(each, Tensor)))
        starts = range(0, size - self.batch_size + 1, self.batch_size)
        if torch.cuda.is_available():
            pool = tree_map(Tensor.pin_memory, pool)
        batches = [tree_map(lambda part, at=at: part[at : at + self.batch_size], pool) for at in starts]
        return DataLoader(_Repeated(batches), batch_size=None)


class Whole(LightningDataModule):
    """Batches that cannot be cut, such as one graph.

    Args:
        name: The line.
        tiny: Whether at the size for a CPU.
    """

    def __init__(self, name: str, *, tiny: bool = False) -> None:
        super().__init__()
        self.line, self.tiny = name, tiny

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        made = _made(_work(self.line, tiny=self.tiny))
        return DataLoader(_Repeated([each.pin_memory() for each in made] if torch.cuda.is_available() else made), None)


class _Repeated(Dataset[Any]):
    def __init__(self, items: Sequence[Any]) -> None:
        self._items = items

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> Any:
        return self._items[index % len(self._items)]


def micro_batch(name: str, *, tiny: bool) -> int | None:
    """Return the samples of a batch of the stock run; None: a batch cannot be cut."""
    first = _work(name, tiny=tiny).batch(Generator().manual_seed(0))
    leaves = tree_leaves(first)
    sizes = {len(each) for each in leaves if isinstance(each, Tensor) and each.dim()}
    is_plain = all(isinstance(each, Tensor) for each in leaves) and len(sizes) == 1
    return max(1, sizes.pop() // MICRO_BATCHES) if is_plain else None


def run_yaml(name: str, *, preset: str, tiny: bool, batch: int | None) -> str:
    """Return a file for ``fit``: the run as Lightning has it by default, in float32."""
    size = f"init_args: {{name: {name}, tiny: {str(tiny).lower()}"
    data = f"Whole\n  {size}}}" if batch is None else f"Batches\n  {size}, batch_size: {batch}}}"
    return f"""preset: {preset}
seed_everything: 1
model:
  class_path: tune_zoo_run.module
  {size}}}
data:
  class_path: tune_zoo_run.{data}
optimizer: {_OPTIMIZERS.get(name, _ADAMW)}
trainer:
  accelerator: {"cpu" if tiny else "gpu"}
  devices: 1
  max_epochs: -1
  max_steps: 10000
  accumulate_grad_batches: {1 if batch is None else MICRO_BATCHES}
"""


def _work(name: str, *, tiny: bool) -> Work:
    return _pde(tiny=tiny) if name == "pde" else load()[name].build(tiny)


def _pde(*, tiny: bool) -> Work:
    """The transformer of physics of examples/pde.py, at the size of `pde.py`."""
    from examples.pde import Forecast

    dim, depth, points, batch = (16, 2, 16, 2) if tiny else (192, 4, 128, 32)

    def make(generator: Generator) -> tuple[Tensor, ...]:
        now = torch.randn(batch, points, points, generator=generator)
        viscosity = 10 ** torch.empty(batch).uniform_(-3, -2, generator=generator)
        return now, viscosity, 0.9 * now.roll((1, 2), dims=(1, 2))

    return Work(Forecast(dim=dim, depth=depth), make)


def _made(work: Work) -> list[Any]:
    return [work.batch(torch.Generator().manual_seed(number)) for number in range(DISTINCT)]


@dataclass(frozen=True)
class Setting:
    """One setting of the grid: fragments of YAML, in which BATCH is the micro-batch that needs no accumulation.

    Args:
        name: Of the setting.
        fragments: The parts; lists of callbacks and plugins append.
        on_cpu: Whether the short form for a CPU has it.
    """

    name: str
    fragments: tuple[str, ...]
    on_cpu: bool = False

    def texts(self, batch: int | None) -> list[str]:
        """Return the fragments for a run of this micro-batch; without one, BATCH is refused as users see it."""
        return [each.replace("BATCH", str(MICRO_BATCHES * (batch or 1))) for each in self.fragments]


def _plugin(name: str, settings: str = "") -> str:
    return f"trainer: {{plugins+: [{{class_path: {name}, init_args: {{{settings}}}}}]}}"


def _callback(name: str, settings: str = "") -> str:
    return f"trainer: {{callbacks+: [{{class_path: {name}, init_args: {{{settings}}}}}]}}"


MIXED = "trainer: {precision: bf16-mixed}"
BF16 = _plugin("BF16Precision")
MASTERS = _plugin("BF16Precision", "weights: masters")
PURE = _plugin("BF16WeightsPrecision")
FLOAT8 = _plugin("Float8Precision", "recipe: tensorwise, filter: auto, on_no_effect: warn")
FLOAT8_ALL = _plugin("Float8Precision", "recipe: tensorwise, on_no_effect: warn")
FLOAT8_ROWS = _plugin("Float8Precision", "recipe: rowwise, filter: auto, on_no_effect: warn")
AUTO = _callback("Compile", "scope: auto, mode: auto")
BLOCKS = _callback("Compile", "scope: blocks")
MODEL = _callback("Compile", "scope: model")
GRAPHS = _callback("Compile", "scope: model, mode: reduce-overhead")
SEARCHED = _callback("Compile", "scope: model, mode: max-autotune-no-cudagraphs")
FLAGS = "flags: {tf32: true, expandable_segments: true, attention: auto}"
CUDNN = "flags: {tf32: true, cudnn_benchmark: true, attention: [cudnn, flash, efficient, math]}"
LATE = "flags: {late_logs: true}"
FUSED = "optimizer: {init_args: {fused: true}}"
AHEAD = _callback("DevicePrefetch")
LARGE = "{data: {init_args: {batch_size: BATCH}}, trainer: {accumulate_grad_batches: 1}}"

GRID = (
    Setting("bf16-mixed", (MIXED,), on_cpu=True),  # stock Lightning, as most use it
    Setting("bf16-mixed, fused, TF32", (MIXED, FUSED, "flags: {tf32: true}"), on_cpu=True),
    Setting("bf16-mixed, model compiled, fused", (MIXED, MODEL, FUSED)),
    Setting("bf16, eager, fused", (BF16, FLAGS, FUSED), on_cpu=True),
    Setting("bf16, auto", (BF16, AUTO, FLAGS)),  # what `preset: h100` says
    Setting("bf16, auto, fused, ahead, late logs", (BF16, AUTO, FLAGS, FUSED, AHEAD, LATE)),
    Setting("bf16, auto, fused, large batch", (BF16, AUTO, FLAGS, FUSED, LARGE)),
    Setting("bf16, blocks, fused", (BF16, BLOCKS, FLAGS, FUSED)),
    Setting("bf16, blocks, fused, cudnn", (BF16, BLOCKS, CUDNN, FUSED)),
    Setting("bf16, CUDA graphs, fused, large batch", (BF16, GRAPHS, FLAGS, FUSED, LARGE)),
    Setting("bf16 masters, auto, fused, large batch", (MASTERS, AUTO, FLAGS, FUSED, LARGE)),
    Setting("bf16 weights, auto, fused, large batch", (PURE, AUTO, FLAGS, FUSED, LARGE)),
    Setting("float8 tensorwise, auto, fused, large batch", (FLOAT8, AUTO, FLAGS, FUSED, LARGE)),
    Setting("float8 tensorwise, all layers, auto, fused, large batch", (FLOAT8_ALL, AUTO, FLAGS, FUSED, LARGE)),
    Setting("float8 rowwise, auto, fused, large batch", (FLOAT8_ROWS, AUTO, FLAGS, FUSED, LARGE)),
    Setting("bf16, max-autotune, fused, large batch, ahead", (BF16, SEARCHED, FLAGS, FUSED, LARGE, AHEAD)),
)


def settings(*, tiny: bool) -> Iterator[Setting]:
    """Yield the settings of the grid; those of a CPU where ``tiny``, with a large batch."""
    if not tiny:
        yield from GRID
        return
    yield from (each for each in GRID if each.on_cpu)
    yield Setting("bf16, large batch", (BF16, LARGE), on_cpu=True)
