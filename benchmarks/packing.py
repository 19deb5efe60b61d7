"""What packing gains over padding, on the files of the standard library, and whether the loss is equal.

    python benchmarks/packing.py --budget 540 --output benchmarks/results/DATE_packing

Documents are the files as bytes. `padded` has a document, or a piece of one that is longer, in each row and padding
behind it, and uses plain causal attention. `greedy` and `best_fit` are the ways of `PackedTokens`, whose attention sees
only tokens of the same document. Sides train in turn, ROUNDS times, each through a `Trainer` with the same model and
shape. Times are of steps between two waits for the GPU, after warm-up; `tokens_per_s` counts real tokens alone.
`ratio` is packed throughput over padded throughput / its share of real tokens: 1 if attention with documents costs
nothing, and the criterion is 0.95. `losses` are means over the same documents of the same model: padded, and best_fit,
which cuts documents at the same places.

On a CPU all sizes are tiny, so that the script can be tried.
"""

import statistics
import sysconfig
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
from cases import main
from device_prefetch import Clock
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, RandomSampler

from lightning_ups import AccelerationFlags, BF16Precision, Compile
from lightning_ups._compat.optional.tokenizers import Encoder, load_encoding
from lightning_ups.data.packed_tokens import PackedRows
from lightning_ups.data.packing import Packing, pack
from lightning_ups.models import GPTModule

ON_GPU = torch.cuda.is_available()
WARM, STEPS, ROUNDS = (20, 50, 2) if ON_GPU else (1, 2, 1)
BATCH, FILES, COMPARED = (16, 800, 2**19) if ON_GPU else (2, 20, 2**13)  # COMPARED: predictions
Side = Literal["padded", "greedy", "best_fit"]
SIDES: tuple[Side, ...] = ("padded", "greedy", "best_fit")


def documents() -> list[np.ndarray[Any, Any]]:
    """Return the tokens of the library's files, in an order that is random and always the same."""
    encoder = Encoder(load_encoding("bytes", bos=None, eos=None))
    root = Path(sysconfig.get_path("stdlib"))
    names = sorted(path for path in root.glob("**/*.py") if "site-packages" not in path.parts)
    names = [names[index] for index in np.random.default_rng(0).permutation(len(names))[:FILES]]
    return [encoder.one(path.read_text(errors="replace")) for path in names]


def rows_of(documents: list[np.ndarray[Any, Any]], side: Side, *, seq_len: int) -> tuple[PackedRows, float]:
    """Return the rows of a side, and the share of their positions that are not padding."""
    lengths = np.array([len(document) for document in documents], np.int64)
    starts = np.cumsum(lengths) - lengths
    packing = pack(starts, lengths, seq_len=seq_len, method="greedy" if side == "greedy" else "best_fit")
    if side == "padded":
        packing = Packing(packing.starts, packing.lengths, np.arange(len(packing.starts) + 1), seq_len)
    return PackedRows([SimpleNamespace(tokens=np.concatenate(documents))], [packing]), packing.efficiency


def module_of(size: Any, seq_len: int) -> GPTModule:
    """Return the model, the same on all sides."""
    torch.manual_seed(0)
    return GPTModule(size=size, vocab_size=257, max_seq_len=seq_len, warmup_steps=10)


def trained(rows: PackedRows, side: Side, size: Any, seq_len: int) -> float:
    """Train once, and return the positions in a second."""
    sampler = RandomSampler(rows, replacement=True, num_samples=BATCH * (WARM + STEPS))
    loader = DataLoader(
        rows, batch_size=BATCH, sampler=sampler, pin_memory=ON_GPU, num_workers=2 if ON_GPU else 0,
        collate_fn=partial(taken, side=side),
    )  # fmt: skip
    fast = [Compile(), AccelerationFlags(attention="auto")] if ON_GPU else []
    clock = Clock(warm=WARM, steps=STEPS)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="gpu" if ON_GPU else "cpu", devices=1, max_steps=WARM + STEPS, callbacks=[*fast, clock],
            plugins=[BF16Precision()] if ON_GPU else [], logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        )  # fmt: skip
        trainer.fit(module_of(size, seq_len), loader)
    return STEPS * BATCH * seq_len / (clock.times[1] - clock.times[0])


def taken(batch: Any, side: Side) -> Any:
    """Return the batch of a side: that of padding is for plain causal attention."""
    return batch._replace(documents=None) if side == "padded" else batch


@torch.inference_mode()
def mean_loss(documents: list[np.ndarray[Any, Any]], side: Side, size: Any, seq_len: int) -> float:
    """Return the mean loss of all predictions, of a model that was not trained."""
    device = "cuda" if ON_GPU else "cpu"
    rows, module = rows_of(documents, side, seq_len=seq_len)[0], module_of(size, seq_len)
    module.configure_model()
    module.to(device).eval()
    total, count = 0.0, 0
    for start in range(0, len(rows), 2):  # in float32, where attention with documents may need much memory
        batch = rows.__getitems__(range(start, min(start + 2, len(rows))))
        real = int((batch.targets >= 0).sum())
        moved = move_data_to_device(taken(batch, side), torch.device(device))
        total, count = total + module.loss(moved).item() * real, count + real
    return total / count


def compared(size: Any, seq_len: int) -> dict[str, Any]:
    """Train all sides in turn, and compare."""
    texts = documents()
    rows = {side: rows_of(texts, side, seq_len=seq_len) for side in SIDES}
    runs: dict[Side, list[float]] = {side: [] for side in SIDES}
    for _ in range(ROUNDS):
        for side in SIDES:
            runs[side].append(trained(rows[side][0], side, size, seq_len))
    positions = {side: statistics.median(runs[side]) for side in SIDES}
    real = {side: positions[side] * rows[side][1] for side in SIDES}
    few = [texts[index] for index in range(int(np.searchsorted(np.cumsum([*map(len, texts)]), COMPARED)) or 1)]
    losses = [mean_loss(few, side, size, seq_len) for side in ("padded", "best_fit")]
    return {
        "share_of_real": {side: round(rows[side][1], 4) for side in SIDES},
        "tokens_per_s": {side: round(real[side]) for side in SIDES},
        "gain": {side: round(real[side] / real["padded"], 3) for side in SIDES[1:]},
        "ratio": {side: round(real[side] / positions["padded"], 3) for side in SIDES[1:]},
        "losses": losses,
        "losses_equal": abs(losses[0] - losses[1]) < 2e-4 * losses[0],
        "positions_per_s": {side: [round(run) for run in runs[side]] for side in SIDES},
    }


CASES: dict[str, Callable[[], dict[str, Any]]] = (
    {f"150M, {seq_len}": partial(compared, "150M", seq_len) for seq_len in (4096, 8192)}
    if ON_GPU
    else {"tiny, 256": partial(compared, "tiny", 256)}
)

if __name__ == "__main__":
    main(CASES, columns=("share_of_real", "tokens_per_s", "gain", "ratio", "losses_equal"), timeout_s=400)
