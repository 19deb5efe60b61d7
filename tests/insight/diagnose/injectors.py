"""A module whose step takes a known time, and problems that cost about 15 % of it."""

import time

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_ups.insight.diagnose import Probe

ROWS, ROW_S = 16, 2e-3
COST_S = 0.15 / 0.85 * ROWS * ROW_S  # 15 % of the step with it


class Work(LightningModule):
    """Needs the same time for each row, and nearly nothing besides."""

    def __init__(self, *, in_step=None, save_s=0.0, optimizer=None):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.in_step, self.save_s, self.optimizer = in_step, save_s, optimizer or torch.optim.SGD

    def training_step(self, batch, index):
        time.sleep(len(batch) * ROW_S)
        if self.in_step is not None:
            self.in_step(self, batch)
        return self.layer(batch).square().mean()

    def on_save_checkpoint(self, checkpoint):
        time.sleep(self.save_s)

    def configure_optimizers(self):
        return self.optimizer(self.parameters(), lr=0.01)


class Rows(Dataset):
    def __init__(self, *, item_s=0.0):
        self.item_s = item_s

    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        if self.item_s:
            time.sleep(self.item_s)
        return torch.ones(4)


class SlowSGD(torch.optim.SGD):
    def step(self, closure=None):
        loss = super().step(closure)
        time.sleep(COST_S)
        return loss


class SlowLogger(CSVLogger):
    def log_metrics(self, metrics, step=None):
        time.sleep(COST_S)


class Chatty(Callback):
    def on_train_batch_end(self, trainer, module, *_):
        module.log("value", 1.0)


class Recompile:
    """Compiles a new graph in each fifth step."""

    def __init__(self):
        self.calls, self.compiled = 0, None

    def __call__(self, module, batch):
        self.calls += 1
        if self.calls % 5 == 1:
            torch.compiler.reset()
            self.compiled = torch.compile(lambda x: x * 2, backend=self.backend)
        self.compiled(batch)

    def backend(self, graph, inputs):
        time.sleep(4 * COST_S)
        return graph.forward


class SlowOnRank1:
    def __call__(self, module, batch):
        if module.global_rank == 1:
            time.sleep(COST_S)


def parts(name, folder):
    """Return the module, the loader and the options of a Trainer with the problem ``name``."""
    module, item_s, options = Work(), 0.0, {}
    if name == "slow loader":
        item_s = COST_S / ROWS
    elif name == "recompilations":
        module = Work(in_step=Recompile())
    elif name == "CPU-bound optimizer":
        module = Work(optimizer=SlowSGD)
    elif name == "excessive logging":
        options = {"logger": SlowLogger(folder), "log_every_n_steps": 1, "callbacks": [Chatty()]}
    elif name == "checkpoint stalls":
        module = Work(save_s=5 * COST_S)
        save = ModelCheckpoint(folder, every_n_train_steps=5, save_top_k=-1)
        options = {"callbacks": [save], "enable_checkpointing": True}
    elif name == "uneven ranks":
        module = Work(in_step=SlowOnRank1())
    return module, DataLoader(Rows(item_s=item_s), batch_size=ROWS), options


def diagnosed(module, loader, folder, *, seconds=1.5, **options):
    """Return the facts of a fit."""
    facts, errors = {}, {}

    def report(row):
        facts.update(row.get("facts", {}))
        if "error" in row:
            errors[row["end"]] = row["error"]

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    callbacks = [*options.pop("callbacks", ()), Probe(report, seconds=seconds)]
    options = {**quiet, "accelerator": "cpu", "max_epochs": 1000, "default_root_dir": folder, **options}
    Trainer(callbacks=callbacks, **options).fit(module, loader)
    assert not errors, errors
    return facts


# On a GPU


class Layers(LightningModule):
    """Products in bfloat16: about 8 ms a step on an H100."""

    def __init__(self, *, in_step=None):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(8)))
        self.in_step = in_step

    def training_step(self, batch, index):
        x, _ = batch
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if self.in_step is not None and number % 4 == 0:
                self.in_step(x)
        return x.float().square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), fused=True)


class SlowExchange(Layers):
    """Holds the device up in each exchange of gradients under DDP."""

    def on_train_start(self):
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        def hook(group, bucket):
            torch.cuda._sleep(1_000_000)
            return allreduce_hook(group, bucket)

        self.trainer.strategy.model.register_comm_hook(None, hook)


class Same(IterableDataset):
    """Yields one batch again and again: its tensors are on the host and not pinned."""

    def __init__(self, rows=4096, extra=1, dtype=torch.bfloat16, pinned=True):
        tensors = torch.randn(rows, 4096, dtype=dtype), torch.zeros(extra, 1024)
        self.batch = tuple(each.pin_memory() if pinned else each for each in tensors)

    def __iter__(self):
        while True:
            yield self.batch


def wait_for_device(x):
    x.sum().item()
    time.sleep(0.0007)


def thrash(x):
    torch.cuda.empty_cache()


ON_GPU = {
    "nothing": lambda: (Layers(), Same(), {}),
    "tiny batch": lambda: (Layers(), Same(rows=32), {}),
    "host sync": lambda: (Layers(in_step=wait_for_device), Same(), {}),
    "unpinned memory": lambda: (Layers(), Same(extra=2048, pinned=False), {}),
    "fp32 matmuls without TF32": lambda: (Layers(), Same(dtype=torch.float32), {"precision": "32-true"}),
    "allocator thrashing": lambda: (Layers(in_step=thrash), Same(), {}),
}


def parts_on_gpu(name):
    """Return the same as `parts` for a GPU."""
    module, data, options = ON_GPU[name]()
    return module, DataLoader(data, batch_size=None), {"accelerator": "gpu", "precision": "bf16-true", **options}


class SameData(LightningDataModule):
    def train_dataloader(self):
        return DataLoader(Same(), batch_size=None)
