"""Healthy training runs, and the same with one injected problem, as YAML files can name them.

`diagnose_injected.py` writes these files. Each class takes the name of a fault, its amount, and whether it is active:
an inactive fault keeps the shapes and the work of the active one, so that the difference of both is its cost.
"""

import fcntl
import itertools
import os
import random
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

CUDA = torch.cuda.is_available()
# Sizes at which a GPU, and not the host, sets the speed of the healthy run: it takes about twice as long as the host.
DIM, LAYERS, HEADS, SEQ, VOCAB = (1024, 8, 16, 512, 8192) if CUDA else (128, 2, 4, 64, 256)
SIDE = 224 if CUDA else 32
GRID, WIDTH, DEPTH, CHUNK = (256, 2048, 8, 512) if CUDA else (64, 512, 4, 128)
BATCH = {"language": 64, "vision": 256, "physics": 64} if CUDA else {"language": 16, "vision": 64, "physics": 8}
ROWS = BATCH["physics"] * CHUNK
MOST_EXTRA = SEQ  # tokens that one rank may have more than the others
LENGTH = 1_000_000  # items of an epoch, so that no run ends one; a distributed sampler lists them all
TURNS = "UPS_BENCHMARK_TURNS"  # the folder of the locks of GPUs
_turns = list[Any]()  # the locks that this process has
_shapes = itertools.count(1)  # of the process: a new run must not find the shapes of an earlier one compiled


def take_turn() -> None:
    """Wait until no other case uses these GPUs, which are this process' until it ends; the ranks of a run share them.

    Imports and the start of processes take longer than what is measured, so that cases wait for the GPU alone.
    """
    folder = os.environ.get(TURNS)
    if folder is None or _turns or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    for gpu in sorted(os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")):  # all in one order: none waits for ever
        file = (Path(folder) / f"turn-{gpu}").open("w")
        fcntl.lockf(file, fcntl.LOCK_EX)  # loader workers do not inherit it
        _turns.append(file)


class Tokens(Dataset[Tensor]):
    """Rows of tokens."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._rows = torch.randint(VOCAB, (512, length + 1), generator=generator)

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Tensor:
        return self._rows[index % len(self._rows)]


class Images(Dataset[tuple[Tensor, int]]):
    """Images in memory; each may cost ``decode`` blocks of 16 KiB that are decompressed."""

    def __init__(self, side: int, dtype: torch.dtype, decode: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._images = torch.randint(256, (64, 3, side, side), generator=generator).to(dtype)
        self._decode = decode
        self._block = zlib.compress(random.Random(0).randbytes(4096) * 4)

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        for _ in range(self._decode):
            zlib.decompress(self._block)
        return self._images[index % len(self._images)], index % 100


class Fields(Dataset[Tensor]):
    """Chunks of periodic initial conditions."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        waves = torch.randn(64, CHUNK, 8, generator=generator)
        angles = torch.linspace(0, 6.2832, GRID) * torch.arange(1, 9)[:, None]
        self._chunks = (waves @ angles.sin()).half()  # one loader worker must do

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Tensor:
        return self._chunks[index % len(self._chunks)]


class Data(LightningDataModule):
    """The data of a run."""

    def __init__(self, kind: str, fault: str = "", amount: float = 0.0, *, active: bool = False) -> None:
        super().__init__()
        self.kind, self.fault, self.amount, self.active = kind, fault, amount, active

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        fault = self.fault if self.active else ""
        batch = batch_size(self.kind, fault, self.amount)
        if self.kind == "language":
            rank = self.trainer.global_rank if self.trainer else 0
            longer = int(self.amount) if fault == "uneven_ranks" and rank == 1 else 0
            dataset: Dataset[Any] = Tokens(SEQ + min(longer, MOST_EXTRA))
        elif self.kind == "vision":
            large = self.fault == "unpinned_memory"  # the amount is the megabytes of a batch
            side = max(SIDE // 2, int((self.amount * 1e6 / 12 / batch) ** 0.5)) if large else SIDE
            decode = int(self.amount) if fault == "slow_loader" else 0
            dataset = Images(side, torch.float32 if large else torch.uint8, decode)
        else:
            dataset = Fields()
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 2
        world = self.trainer.world_size if self.trainer else 1
        return DataLoader(
            dataset,
            batch_size=batch,
            shuffle=False,
            num_workers=max(1, min(8, cores // world - 2)) if CUDA else 1,
            pin_memory=CUDA and fault != "unpinned_memory",
            persistent_workers=True,
            drop_last=True,
        )


def batch_size(kind: str, fault: str, amount: float) -> int:
    """Return the batch size of a run; ``fault`` is "" where it is not active."""
    return max(1, round(BATCH[kind] / (1 + amount))) if fault == "tiny_batch" else BATCH[kind]


class Injected(LightningModule):
    """What all modules share: faults that do not depend on the model."""

    def __init__(self, fault: str = "", amount: float = 0.0, *, active: bool = False) -> None:
        super().__init__()
        take_turn()
        self.fault, self.amount, self.active = fault, amount, active
        torch.set_float32_matmul_precision("highest" if self.has("no_tf32") else "high")

    def has(self, fault: str) -> bool:
        """Return whether ``fault`` is active."""
        return self.active and self.fault == fault

    @override
    def on_train_start(self) -> None:
        wrapped: Any = self.trainer.strategy.model
        if self.has("throttled_exchange") and hasattr(wrapped, "register_comm_hook"):
            wrapped.register_comm_hook(self.amount, _exchange_slowly)

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses = self.losses(batch)
        loss = losses.mean()
        if self.has("host_sync"):
            self.largest = max((value.item() for value in losses.detach().flatten()[: int(self.amount)]), default=0.0)
        self.log("loss", loss)
        if self.has("excessive_logging"):
            for number in range(int(self.amount)):
                self.log(f"statistic_{number}", loss.detach(), on_step=True)
        return loss

    def losses(self, batch: Any) -> Tensor:
        """Return the losses of a batch, one for each token, image or point."""
        raise NotImplementedError

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.has("slow_optimizer"):
            return torch.optim.AdamW(self.parameters(), lr=1e-4, foreach=False, fused=False)
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


def _exchange_slowly(amount: float, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket over a link that is 1 + ``amount`` times slower: more all-reduces go first."""
    buffer = bucket.buffer().div_(dist.get_world_size())
    scratch = torch.zeros_like(buffer)
    sizes = [buffer.numel()] * int(amount) + [int(amount % 1 * buffer.numel())]
    extra: list[Any] = [dist.all_reduce(scratch[:size], async_op=True) for size in sizes if size]
    if not CUDA:  # gloo runs them at the same time
        for one in extra:
            one.wait()
    work: Any = dist.all_reduce(buffer, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    @override
    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Language(Injected):
    """A small GPT."""

    def __init__(self, fault: str = "", amount: float = 0.0, *, active: bool = False) -> None:
        super().__init__(fault, amount, active=active)
        self.embedding, self.positions = nn.Embedding(VOCAB, DIM), nn.Embedding(SEQ + MOST_EXTRA, DIM)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)
        self.float32_part = None
        if fault == "no_tf32":  # the amount is the width of a part that stays in float32
            self.float32_part = nn.Sequential(nn.Linear(DIM, width := 64 * max(1, int(amount))), nn.Linear(width, DIM))

    @override
    def losses(self, batch: Tensor) -> Tensor:
        tokens = batch[:, :-1]
        places = torch.arange(tokens.shape[1], device=self.device)
        x = self.blocks(self.embedding(tokens) + self.positions(places))
        if self.float32_part is not None:
            with torch.autocast(self.device.type, enabled=False):
                x = x + self.float32_part(x.float())
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), batch[:, 1:].flatten(), reduction="none")


class Bottleneck(nn.Module):
    """A block of a residual network."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        inner = out // 4
        self.path = nn.Sequential(
            *_convolution(into, inner, 1), nn.ReLU(inplace=True),
            *_convolution(inner, inner, 3, stride), nn.ReLU(inplace=True), *_convolution(inner, out, 1),
        )  # fmt: skip
        self.skip = nn.Identity() if into == out else nn.Sequential(*_convolution(into, out, 1, stride))

    @override
    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.path(x) + self.skip(x), inplace=True)


def _convolution(into: int, out: int, size: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(into, out, size, stride, size // 2, bias=False), nn.BatchNorm2d(out)


def convnet() -> nn.Module:
    """Return torchvision's ResNet-50 or, where that is not installed, the same in plain torch; a small one on a CPU."""
    if CUDA:
        try:
            from torchvision.models import resnet50  # pyright: ignore[reportMissingImports]

            return resnet50(num_classes=100)
        except ImportError:
            pass
    width, blocks = (64, (3, 4, 6, 3)) if CUDA else (8, (1, 1))
    layers: list[nn.Module] = [*_convolution(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    into = width
    for stage, count in enumerate(blocks):
        for number in range(count):
            layers.append(Bottleneck(into, out := 4 * width * 2**stage, 2 if stage and not number else 1))
            into = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(into, 100))


class Vision(Injected):
    """A convnet on images that arrive as bytes."""

    def __init__(self, fault: str = "", amount: float = 0.0, *, active: bool = False) -> None:
        super().__init__(fault, amount, active=active)
        self.net = convnet().to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]

    @override
    def losses(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        images = images.float().div_(255).sub_(0.5)
        if images.shape[-1] != SIDE:
            images = functional.interpolate(images, size=(SIDE, SIDE), mode="area")
        images = images.contiguous(memory_format=torch.channels_last)
        return functional.cross_entropy(self.net(images), labels, reduction="none")


def residual(before: Tensor, after: Tensor) -> Tensor:
    """Return how far a step of the heat equation is from being solved, at each point."""
    curvature = after.roll(1, -1) - 2 * after + after.roll(-1, -1)
    return (after - before - 0.25 * curvature).square()


class Physics(Injected):
    """An MLP that solves a step of a PDE, with plain float32 and TF32."""

    def __init__(self, fault: str = "", amount: float = 0.0, *, active: bool = False) -> None:
        super().__init__(fault, amount, active=active)
        widths = [GRID, *[WIDTH] * (DEPTH - 1), GRID]
        layers = [part for sizes in itertools.pairwise(widths) for part in (nn.Linear(*sizes), nn.GELU())]
        self.net = nn.Sequential(*layers[:-1])
        self.residual = residual
        small = max(1, int(amount)) if fault == "slow_optimizer" else 0
        self.scales = nn.ParameterList(nn.Parameter(torch.zeros(GRID)) for _ in range(small))
        if fault == "recompilations":
            limits: Any = torch.compiler.config  # a user who raised them when torch said that they were reached
            limits.recompile_limit = limits.accumulated_recompile_limit = 1_000_000
            # Inductor takes two seconds each time, so that some of its compilations cost 15 % of a minute and no step.
            self.residual = torch.compile(residual, dynamic=False, backend="aot_eager")
        self._steps, self._owed = 0, 0.0
        self._rows, self._sizes = ROWS - 1, random.Random(0)

    @override
    def losses(self, batch: Tensor) -> Tensor:
        self._steps += 1
        batch = batch.flatten(0, 1).float()
        if self.fault == "recompilations":  # the amount is how many steps of a hundred have a new shape
            if self.active and self._steps % max(1, round(100 / self.amount)) == 0:
                self._rows = ROWS - 1 - next(_shapes) % (ROWS // 2)
            batch = batch[: self._rows]
        if self.fault == "allocator_thrashing":
            batch = batch[: int(len(batch) * self._sizes.uniform(0.7, 1.0))]
        x = batch
        if len(self.scales):
            x = x + torch.stack([*self.scales]).mean(0)
        for layer in self.net:
            self._free_memory()
            x = layer(x)
        return self.residual(batch, x)

    def _free_memory(self) -> None:
        """Give cached memory back to the device, ``amount`` times in a hundred layers."""
        if not self.has("allocator_thrashing"):
            return
        self._owed += self.amount / 100
        while self._owed >= 1:
            self._owed -= 1
            torch.cuda.empty_cache()


MODELS = {"language": Language, "vision": Vision, "physics": Physics}
