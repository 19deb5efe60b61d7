"""A causal language model of transformers on one GPU: `HFCausalLM`, our GPT, `transformers.Trainer` and TRL.

    python benchmarks/hf.py --budget 540 --rounds 3 --output hf.jsonl     # again until nothing is left
    python benchmarks/hf.py --report hf.jsonl --json hf.json

All sides train the shape of Llama 3.2 1B with an untied head from the same random weights, on the same random tokens,
in full rows: bf16 autocast over float32 weights, AdamW (fused), a constant learning rate, no clipping, no gradient
checkpointing. `hf` is `HFCausalLM` and `gpt` is our GPT, both with the preset h100. `trainer` is `transformers.Trainer`
with torch_compile and sdpa; `trainer_liger` has Liger's kernels in place of torch_compile. `trl` is TRL's SFTTrainer
with packing, which concatenates rows; its layers are compiled one by one, because a compiled model would turn the
collator's mask into a dense one. Sides whose packages are missing are left out.

The interval of `tokens/s` is that of all blocks of timed steps. `hf over` is the ratio of medians of runs. What a run
compiles is kept for later rounds, and `first step s` is the longest of all rounds. Everything else is as in `zoo.py`,
which makes the runs.
"""

import os
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Generator, Tensor
from typing_extensions import override
from zoo import EXPECTED, LINES, SIDES, Benchmark, Records, main
from zoo_modules import Line
from zoo_modules.base import DISTINCT, Batches, Make, Work
from zoo_run import ENDLESS, Meter, Side, Steps, preset

from lightning_ups.data import PackedBatch
from lightning_ups.models import GPTModule, HFCausalLM
from lightning_ups.models.gpt import SIZES
from lightning_ups.models.hf_names import from_hf, hf_config

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
SHAPES: Sequence[tuple[int, int]] = ((4096, 4), (8192, 2), (4096, 8))  # length and number of rows
RECIPE: Mapping[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
NEEDS = {
    "hf": (),
    "trainer": ("accelerate",),
    "gpt": (),
    "trl": ("accelerate", "trl", "datasets"),
    "trainer_liger": ("accelerate", "liger_kernel"),
}
EPOCH = 50  # repetitions of the batches in an epoch of a `transformers.Trainer`


class Drawn(HFCausalLM):
    """Draws its weights where it trains; the same ones on all sides."""

    @override
    def configure_model(self) -> None:
        torch.manual_seed(0)
        with DEVICE:
            super().configure_model()


def load() -> None:
    """Enter the lines and the sides that the zoo does not have."""
    for seq, rows in SHAPES:
        name = f"1B_{seq}_b{rows}"
        LINES[name] = Line(name, "causal", ("transformers",), "", partial(_work, seq, rows))
    EXPECTED.update(dict.fromkeys(NEEDS, 60))
    kept = Path(tempfile.gettempdir()) / "compiled_hf"
    os.environ |= {"TORCHINDUCTOR_CACHE_DIR": str(kept), "TRITON_CACHE_DIR": str(kept / "triton")}
    SIDES.update(
        hf=Side(preset),
        gpt=Side(preset, loop=by_gpt),
        trainer=Side(dict, loop=by_trainer),
        trainer_liger=Side(dict, loop=partial(by_trainer, liger=True)),
        trl=Side(dict, loop=by_trl),
    )


def sides() -> list[str]:
    """Return the sides whose packages are installed."""
    return [side for side, packages in NEEDS.items() if all(find_spec(package) for package in packages)]


def _work(seq: int, rows: int, tiny: Any) -> Work:
    """Return a module and its batches; ``tiny`` for the CPU."""
    seq, rows, size = (32, 2, "tiny") if tiny else (seq, rows, "1B")
    config = hf_config(SIZES[size])  # type: ignore[index]

    def make(generator: Generator) -> dict[str, Tensor]:
        tokens = torch.randint(config["vocab_size"], (rows, seq), generator=generator)
        return {"input_ids": tokens, "labels": tokens}

    return Work(Drawn(config=config, schedule="constant", warmup_steps=0, **RECIPE), make)


def by_gpt(module: HFCausalLM, make: Make, meter: Meter) -> None:
    """Train our GPT by a stock Trainer, from the weights of ``module``."""
    size = "1B" if ON_GPU else "tiny"

    class Ours(GPTModule):
        @override
        def configure_model(self) -> None:
            module.configure_model()
            with DEVICE:
                super().configure_model()
            self.model.load_state_dict(from_hf(module.model.state_dict(), self.config), strict=False)
            module.model = None

    def packed(generator: Generator) -> PackedBatch:
        tokens = make(generator)["input_ids"]
        targets = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
        return PackedBatch(tokens, targets, torch.arange(tokens.shape[1]).expand_as(tokens), None)  # type: ignore[arg-type]

    settings = preset()
    settings["callbacks"].append(meter)
    trainer = Trainer(
        accelerator="gpu" if ON_GPU else "cpu", devices=1, max_epochs=-1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **settings,
    )  # fmt: skip
    ours = Ours(size=size, schedule="constant", warmup_steps=0, **RECIPE)
    trainer.fit(ours, datamodule=Batches(packed, epoch=ENDLESS))


def by_trainer(module: HFCausalLM, make: Make, meter: Meter, *, liger: bool = False) -> None:
    """Train by ``transformers.Trainer``."""
    import transformers

    batches = [make(Generator().manual_seed(number)) for number in range(DISTINCT)]
    rows = [{"input_ids": row, "labels": row} for batch in batches for row in batch["input_ids"]]
    with tempfile.TemporaryDirectory() as folder:
        more: dict[str, Any] = {"use_liger_kernel": True} if liger else compiled()
        options = transformers.TrainingArguments(**arguments(folder, batches), **more)
        train(transformers.Trainer, meter, model=drawn(module), args=options, train_dataset=rows * EPOCH)


def by_trl(module: HFCausalLM, make: Make, meter: Meter) -> None:
    """Train by TRL's SFTTrainer."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    trl, datasets = import_module("trl"), import_module("datasets")
    batches = [make(Generator().manual_seed(number)) for number in range(DISTINCT)]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<eos>": 0}, "<eos>")), eos_token="<eos>", pad_token="<eos>"
    )
    rows = [row.tolist() for batch in batches for row in batch["input_ids"]]
    os.environ["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_DATASETS_CACHE"] = folder
        options = trl.SFTConfig(
            **arguments(folder, batches), **compiled(), packing=True, packing_strategy="wrapped",
            max_length=len(rows[0]), gradient_checkpointing=False,
        )  # fmt: skip
        data = datasets.Dataset.from_dict({"input_ids": rows * EPOCH})
        train(trl.SFTTrainer, meter, model=drawn(module), args=options, processing_class=tokenizer, train_dataset=data)


def drawn(module: HFCausalLM) -> Any:
    """Return the model of ``module`` as transformers makes it."""
    module.options["attn_implementation"] = "sdpa"
    module.configure_model()
    return module.model


def compiled() -> dict[str, Any]:
    """Return the options of `TrainingArguments` that compile."""
    return {"torch_compile": True, "torch_compile_backend": "inductor" if ON_GPU else "aot_eager"}


def arguments(folder: str, batches: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
    """Return the options of `TrainingArguments`: the fastest that do the same work."""
    return {
        "output_dir": folder,
        "per_device_train_batch_size": len(batches[0]["input_ids"]),
        "max_steps": ENDLESS,
        "bf16": True,
        "tf32": True if ON_GPU else None,
        "use_cpu": not ON_GPU,
        "optim": "adamw_torch_fused",
        "learning_rate": RECIPE["lr"],
        "adam_beta1": RECIPE["betas"][0],
        "adam_beta2": RECIPE["betas"][1],
        "weight_decay": RECIPE["weight_decay"],
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "train_sampling_strategy": "sequential",
        "dataloader_num_workers": 2 if ON_GPU else 0,
        "dataloader_persistent_workers": ON_GPU,
        "logging_strategy": "no",
        "logging_nan_inf_filter": False,  # it waits for the GPU in each step
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 0,
    }


def train(kind: type[Any], meter: Meter, **given: Any) -> None:
    """Train by a Trainer of transformers, and let ``meter`` see each step."""
    from transformers import TrainerCallback

    losses, run = list[Tensor](), Steps()

    class Metered(kind):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            losses[:] = [super().training_step(*args, **kwargs)]
            return losses[0]

    class Seen(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            meter.on_train_batch_end(run, kwargs["model"], {"loss": losses[0]}, None, 0)  # type: ignore[arg-type]
            control.should_training_stop = run.should_stop
            return control

    trainer = Metered(callbacks=[Seen()], **given)
    trainer.train()
    meter.on_train_end(run, trainer.model)  # type: ignore[arg-type]


def summary(records: Records) -> dict[str, Any]:
    """Return for each line and side the tokens in a second, with their interval, and the ratio of `hf` to the side."""
    lines: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for run in records["run"]:
        lines.setdefault(run["line"], {}).setdefault(run["side"], []).append(run)
    return {name: {side: _row(name, runs, of) for side, runs in of.items()} for name, of in lines.items()}


def _row(line: str, runs: Sequence[Mapping[str, Any]], of: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    timed, reference = (
        [run for run in each if "step_ms" in run and "error" not in run] for each in (runs, of.get("hf", ()))
    )
    if not timed:
        return {"error": next((run["error_line"] for run in runs if "error_line" in run), "no time")}
    _, seq, rows = line.split("_")
    tokens = int(seq) * int(rows.removeprefix("b")) * 1e3
    blocks = [tokens / each for run in timed for each in run["blocks_ms"]]
    middle = median([run["step_ms"] for run in timed])
    return {
        "rounds": len(timed),
        "tokens_per_s": tokens / middle,
        "interval": [min(blocks), max(blocks)],
        "step_ms": middle,
        "hf_over": middle / median([run["step_ms"] for run in reference]) if reference else None,
        "peak_gib": median([run.get("peak_gib", 0.0) for run in timed]),
        "first_step_s": max(run["first_step_s"] for run in timed),
        "losses": [timed[-1]["losses"][0], fmean(timed[-1]["losses"][-5:])],
    }


def report(records: Records) -> str:
    """Return a table with a row for each line and side."""
    head = ("line", "side", "tokens/s", "interval", "rounds", "hf over", "peak GiB", "first step s", "losses")
    cards = sorted({card for call in records["call"] for card in call["cards"]})
    lines = [", ".join(cards) or "CPU", "", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for name, rows in summary(records).items():
        for side, row in rows.items():
            cells = [row.get("error", "")] + [""] * 6
            if "error" not in row:
                low, high = row["interval"]
                ratio = "" if row["hf_over"] is None else f"{row['hf_over']:.3f}"
                cells = [f"{row['tokens_per_s']:.0f}", f"{low:.0f} to {high:.0f}", str(row["rounds"]), ratio]
                cells += [f"{row['peak_gib']:.1f}", f"{row['first_step_s']:.1f}"]
                cells += [" to ".join(f"{loss:.4f}" for loss in row["losses"])]
            lines.append(f"| {' | '.join([name, side, *cells])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main(
        Benchmark(
            script=Path(__file__),
            description=__doc__,
            load=load,
            sides=sides(),
            share=1,
            longest_first=False,
            report=report,
            summary=summary,
        )
    )
