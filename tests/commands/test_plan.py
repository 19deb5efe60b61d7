import json
import re
from dataclasses import replace

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from lightning_ups.__main__ import main as command_line
from lightning_ups.callbacks import ActivationOffload
from lightning_ups.commands.plan import main, own_options, read_batch, show
from lightning_ups.config.requested_run import RequestedRun, run_of
from lightning_ups.insight.memory.described_run import Uncountable
from lightning_ups.insight.memory.plan import Planner
from lightning_ups.models import GPTModule
from lightning_ups.precision import Float8Precision
from tests.cli_toys import Data, Toy
from tests.command import DATA, MODEL
from tests.config.test_requested_run import DEFAULTS

SETTINGS = DEFAULTS | {"accumulate_grad_batches": 1}


def asked(*callbacks, module=None, data=None, make_optimizer=None, **settings):
    if module is None:
        module = GPTModule(size="tiny")
        module.config = replace(module.config, num_layers=2)  # each takes a rehearsal some time
        with torch.device("meta"):
            module.configure_model()
    trainer = SETTINGS | settings
    spec = trainer["strategy"]
    if isinstance(spec, dict):  # as the configuration has it; the run has the strategy itself
        from lightning_ups.strategies import FSDP2Strategy

        spec = FSDP2Strategy(**spec["init_args"])
    return RequestedRun(
        run=run_of(module, trainer | {"strategy": spec}, callbacks),
        optimizer=None,
        config={"trainer": trainer},
        slots={},
        data=data,
        make_optimizer=make_optimizer,
    )


@pytest.fixture(autouse=True)
def without_compiling(request, monkeypatch):
    """Leave out the variant that takes the most time, but in slow tests."""
    if request.node.get_closest_marker("slow") is None:
        variants = Planner._variants
        monkeypatch.setattr(Planner, "_variants", lambda self: (v for v in variants(self) if v.name != "Compile"))


@pytest.fixture
def keep(monkeypatch):
    """Return what leaves out all variants but those of some names: each is rehearsed, several times."""
    variants = Planner._variants

    def keep(*names):
        monkeypatch.setattr(Planner, "_variants", lambda self: (v for v in variants(self) if v.name in names))

    return keep


def shown(capsys, *args, **options):
    code = show(*args, **options)
    return code, capsys.readouterr().out


def test_the_table_of_gpus(capsys):
    assert main(["--gpu", "list"]) == 0
    assert "NVIDIA GeForce RTX 4090" in capsys.readouterr().out


@pytest.mark.parametrize("size", ["-5", "-0.5", "nan", "inf"])
def test_a_size_that_no_gpu_has(size):
    with pytest.raises(ValueError, match=rf"--gpu {size} .*--gpu 24"):
        show(None, gpu=size)


def test_own_options_and_those_of_fit():
    words = ["--config", "run.yaml", "--devices", "8", "--nodes=2", "--gpu", "h200", "--json", "--model.size", "1B"]
    assert main(words) is None, "a configuration is needed"
    own, rest = own_options(words)
    assert own == {"gpu": "h200", "batch": None, "as_json": True}
    assert rest == ["--config", "run.yaml", "--model.size", "1B", "--trainer.devices", "8", "--trainer.num_nodes", "2"]


def test_batches_in_words():
    assert read_batch("4x4097:int64").shape == (4, 4097)
    assert read_batch("4x4097:int64").dtype is torch.int64
    named = read_batch("images=8x3x16x16,labels=8:int64")
    assert named["images"].dtype is torch.float32
    assert named["labels"].shape == (8,)
    first, second = read_batch("2x3,5:bool")
    assert (first.shape, second.dtype) == ((2, 3), torch.bool)
    assert read_batch("4x4097:int64").is_meta
    nested = read_batch("heat.input=4x2x8x8, heat.time=4, noise=3")
    assert (nested["heat"]["input"].shape, nested["heat"]["time"].shape, len(nested)) == ((4, 2, 8, 8), (4,), 2)


@pytest.mark.parametrize(
    "spec",
    ["four", "4x:int64", "4x4:int65", "", "4x4:nn", "a=2,a.b=3", "a.b=3,a=2", "a=2,a=3", "a=2,3", "0x4", "4x0:int64"],
)
def test_no_batch(spec):
    with pytest.raises(ValueError, match=r"labels=8:int64\.$"):
        read_batch(spec)


class Several(LightningModule):
    """Takes a batch of each of several datasets."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 8)

    def training_step(self, batch, _):
        return sum(self.net(part).square().mean() for part in batch.values())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters())


class SeveralData(LightningDataModule):
    def __init__(self, combine):
        super().__init__()
        self.combine = combine

    def train_dataloader(self):
        loaders = {name: DataLoader(torch.zeros(8, 8), batch_size=4, num_workers=1) for name in ("heat", "waves")}
        return self.combine(loaders)


@pytest.mark.parametrize("combine", [dict, CombinedLoader, lambda loaders: CombinedLoader(loaders, "min_size")])
def test_several_loaders(combine, capsys):
    code, out = shown(capsys, asked(module=Several(), data=lambda: SeveralData(combine)), gpu="80")
    assert code == 0
    assert "4 samples (from SeveralData)" in out


def test_what_is_said(capsys):
    code = show(asked(), batch="4x65:int64", gpu="rtx-4090")
    out, err = capsys.readouterr()
    first, verdict, second, *_ = err.splitlines()
    assert first == "plan: as configured"
    assert "it fits" in verdict, "before minutes of other settings"
    assert second.startswith("plan: ActivationCheckpoint(save=matmuls) (1 of ")
    assert code == 0
    assert out.startswith("run       GPTModule, 459 k parameters")
    assert "4 samples of 65 positions (from --batch)" in out
    assert "NVIDIA GeForce RTX 4090" in out
    assert "it fits" in out
    assert "optimizer state" in out
    rows = [line for line in out.splitlines() if line.startswith(("as configured", "Compile", "ActivationCheckpoint"))]
    assert len(rows) == 3
    assert all(" yes" in row for row in rows)
    assert max(map(len, out.splitlines())) <= 125


def test_what_is_endless_or_long_stays_in_its_column(capsys, keep):
    keep("ActivationOffload")
    _, out = shown(capsys, asked(module=Toy()), batch="4x8", gpu="h200")
    assert "largest batch at this length: more than a million samples" in out
    (row,) = [line for line in out.splitlines() if line.startswith("as configured")]
    assert row.split()[-2:] == ["yes", ">10^6"]
    (row,) = [line for line in out.splitlines() if line.startswith("ActivationOffload")]
    assert "not counted: " in row
    assert row.endswith(" ...")


def test_what_lies_on_the_host_and_what_would_move_nothing(capsys, keep):
    keep()
    idle = "ActivationOffload would move nothing"
    code, out = shown(capsys, asked(ActivationOffload()), batch="64x257:int64")
    assert code == 0
    assert re.search(r"^ +[0-9.]+ [GM]iB of host memory$", out, re.MULTILINE)
    assert idle not in " ".join(out.split())
    _, small = shown(capsys, asked(ActivationOffload()), batch="1x9:int64")
    assert "of host memory" not in small
    assert idle in " ".join(small.split())
    _, facts = shown(capsys, asked(ActivationOffload()), batch="64x257:int64", as_json=True)
    assert json.loads(facts)["settings"][0]["host_bytes"] > 10 * 2**20


def test_what_does_not_fit_says_what_to_write_and_ends_with_2(capsys, keep):
    keep("ActivationCheckpoint(save=nothing)", "OptimizerOffload")
    _, before = shown(capsys, asked(), batch="4096x65:int64", as_json=True)
    facts = json.loads(before)["settings"]
    least = min(row["peak_bytes"] for row in facts)
    gib = (1.02 * least / 2**30 + 0.1) / 0.97 + 0.6
    assert facts[0]["peak_bytes"] > 1.2 * least
    code, out = shown(capsys, asked(), batch="4096x65:int64", gpu=f"{gib:.3f}" if gib > 2 else "2.01")
    assert code == 2
    assert "does NOT fit" in out
    assert "# so that it fits: " in out
    assert "trainer.callbacks+: [{class_path:" in out or "data.init_args.batch_size: " in out


def test_without_a_gpu_it_says_which_holds_it(capsys, monkeypatch, keep):
    keep("ActivationCheckpoint(save=nothing)")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, out = shown(capsys, asked(), batch="4x65:int64")
    assert code == 0
    text = " ".join(out.split())
    assert "This machine has no GPU. No GPU is named: the smallest GPU of the table that holds it is NVIDIA" in text
    assert "This configuration trains on a CPU." in text
    assert "each GPU" not in text
    assert "  fits" not in out


def test_the_preset_auto_follows_the_gpu(ups, keep):
    keep()
    outcome = ups("plan", "--preset", "auto", "--gpu", "h100-80", tree={"model": MODEL, "data": DATA})
    assert outcome.code == 0
    assert "preset auto: h100" in outcome.err
    assert "BF16Precision" in outcome.out


def test_settings_that_cost_speed_and_save_nothing_are_left_out(capsys, keep):
    keep("ActivationCheckpoint(save=nothing)", "ActivationCheckpoint(save=matmuls)")
    _, out = shown(capsys, asked(module=Toy()), batch="4x8", gpu="24")  # whose blocks save as much as they are given
    assert "save less than 1 % here: ActivationCheckpoint(save=matmuls), ActivationCheckpoint(save=nothing)" in (
        " ".join(out.split())
    )
    assert not [line for line in out.splitlines() if line.startswith("ActivationCheckpoint")]


@pytest.mark.slow
def test_the_settings_of_the_strategy(capsys):
    peaks = {}
    for sharding in ("full", "gradients"):
        strategy = {"class_path": "FSDP2Strategy", "init_args": {"sharding": sharding}}
        _, out = shown(
            capsys, asked(strategy=strategy, devices=2, accelerator="gpu"), batch="64x65:int64", as_json=True
        )
        peaks[sharding] = json.loads(out)["settings"][0]["peak_bytes"]
    assert peaks["full"] < peaks["gradients"]


def test_the_first_batch_of_the_data(capsys):
    code, out = shown(capsys, asked(module=Toy(), data=Data), as_json=True, gpu="24")
    assert code == 0
    assert json.loads(out)["batch"] == {"samples": 4, "positions": None, "from": "Data"}


@pytest.mark.parametrize("asks_its_trainer", [False, True])
def test_the_first_batch_is_the_one_that_the_data_module_makes_of_it(asks_its_trainer, capsys):
    class Halved(Data):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch[:2] if not asks_its_trainer or self.trainer.training else batch

    code, out = shown(capsys, asked(module=Toy(), data=Halved), as_json=True, gpu="24")
    assert code == 0
    assert json.loads(out)["batch"]["samples"] == (4 if asks_its_trainer else 2)


def test_the_optimizer_of_the_section(capsys):
    def state(make):
        _, out = shown(capsys, asked(module=Toy(), make_optimizer=make), batch="4x8", as_json=True)
        return json.loads(out)["settings"][0]["by_kind"].get("optimizer state", 0)

    assert state(None) == 0
    assert state(lambda module: torch.optim.Adam(module.parameters())) > 0


RUN = """
model: {class_path: GPTModule, init_args: {size: tiny}}
data: {class_path: RandomTokens, init_args: {vocab_size: 256, seq_len: 64, batch_size: 4}}
optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.1}}
trainer: {accelerator: cpu, strategy: fsdp2, devices: 2, plugins: [BF16Precision]}
"""


@pytest.mark.slow
def test_from_the_command_line(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    code = command_line(["plan", "--config", str(path), "--gpu", "24", "--devices", "4", "--json"])
    facts = json.loads(capsys.readouterr().out)
    assert code == 0
    assert (facts["devices"], facts["device"]["gib"]) == (4, 24)
    assert facts["batch"] == {"samples": 4, "positions": 65, "from": "RandomTokens"}
    assert facts["settings"][0]["name"] == "as configured"
    assert sum(facts["settings"][0]["by_kind"].values()) == facts["settings"][0]["peak_bytes"]
    assert {"Compile", "ActivationCheckpoint(save=nothing)"} <= {
        row["name"] for row in facts["settings"] if row["fits"]
    }
    assert facts["settings"][0]["by_kind"].get("optimizer state", 0) == 0  # the section's SGD keeps nothing
    assert command_line(["plan", "--config", str(path), "--gpu", "h101"]) == 2
    assert "'h101' is not in the table." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "names"),
    [
        (None, "section 'data'"),
        (FileNotFoundError("/data/tokens"), "from Away: FileNotFoundError: /data/tokens"),
        (FileNotFoundError(), "from Away: FileNotFoundError"),
    ],
)
def test_no_batch_of_the_data(error, names):
    class Away(Data):
        def setup(self, stage):
            raise error

    with pytest.raises(ValueError, match=rf"{names}.*plan --batch 4x4097:int64"):
        show(asked(data=Away if error else None), gpu="24")


def test_what_cannot_be_counted():
    with pytest.raises(Uncountable, match="TokenThroughput"):
        show(asked(module=Toy()), batch="4x9", gpu="24")


def test_float8_of_layers_that_are_yet_to_be_timed_is_counted(capsys, keep):
    keep()
    precision = Float8Precision(filter="auto", emulate=True)
    code, out = shown(capsys, asked(plugins=[precision]), batch="4x65:int64", gpu="24")
    assert code == 0
    assert "filter='auto' is counted as filter='all'" in out
