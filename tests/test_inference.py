"""Validation, test and prediction under each preset, as docs/guides/inference.md says, on a CPU."""

import math
import re
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.cli import instantiate_class
from torch import nn
from torch.utils.data import DataLoader

from lightning_ups.callbacks import AccelerationFlags
from lightning_ups.config import presets
from tests.toys import Net, trainer

PAGE = Path(__file__).parent.parent / "docs" / "guides" / "inference.md"
HERE = {"Compile": {"backend": "aot_eager"}, "Float8Precision": {"emulate": True, "filter": "all"}}  # what a CPU can do
FOR_TRAINING = ("ActivationCheckpoint", "ActivationOffload", "OptimizerOffload")  # parts that do nothing in prediction
ONES = [torch.ones(rows, length, 16) / (1 + rows) for rows, length in ((4, 8), (4, 8), (2, 8), (4, 5), (1, 3))]
pytestmark = pytest.mark.filterwarnings("ignore")


class Model(Net):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3))
        self.head = nn.Linear(16, 1)

    def forward(self, batch):
        for layer in self.layers:
            batch = batch + layer(batch)
        return self.head(batch)

    def validation_step(self, batch):
        self.log("validation", self(batch).square().mean())

    def test_step(self, batch):
        self.log("test", self(batch).square().mean())

    def predict_step(self, batch):
        self.kinds = {type(layer).__name__ for layer in self.modules()}
        return self(batch)


def batches():
    return DataLoader(ONES, batch_size=None)


def runner(tmp_path, preset):
    """Return a Trainer with a preset, on the CPU."""
    settings = yaml.safe_load(presets.text(preset))
    options = {key: value for key, value in settings["trainer"].items() if key != "accelerator"}
    for key in ("plugins", "callbacks"):
        options[key] = [
            instantiate_class((), {**spec, "init_args": spec.get("init_args", {}) | HERE.get(name, {})})
            for spec in options.get(key, ())
            for name in [spec["class_path"].rpartition(".")[2]]
        ]
    options["callbacks"].insert(0, AccelerationFlags(**settings.get("flags", {})))
    return trainer(tmp_path, epochs=2, **options)


def plain(module):
    with torch.inference_mode():
        return [module.eval()(batch) for batch in ONES]


@pytest.mark.parametrize(
    "preset", [pytest.param(name, marks=[pytest.mark.slow] * (name == "h200-fp8")) for name in presets.names()]
)
def test_each_kind_of_run_with_batches_of_varying_shape(tmp_path, preset, caplog):
    run, module = partial(runner, tmp_path, preset), Model()
    before = plain(module)
    trained = run()
    trained.fit(module, batches(), batches())  # validates too
    assert math.isfinite(trained.callback_metrics["validation"])
    caplog.clear()
    with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"):
        predicted = trained.predict(module, batches())
    assert not [line for line in caplog.messages if line.startswith(FOR_TRAINING)]
    assert ("Float8Linear" in module.kinds) == (preset == "h200-fp8")
    assert predicted[0].dtype is (torch.float32 if preset in ("cpu", "memory") else torch.bfloat16)
    assert "forward" not in vars(module.layers[0])
    trained.save_checkpoint(tmp_path / "trained.ckpt")
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    assert [p.shape[:2] for p in predicted] == [batch.shape[:2] for batch in ONES]

    for kind in ("validate", "test"):
        ((name, loss),) = getattr(run(), kind)(module, batches(), verbose=False)[0].items()
        assert math.isfinite(loss), name

    # After training: in another Trainer, by `ckpt_path`, and without Lightning.
    again = run().predict(Model(), batches(), ckpt_path=tmp_path / "trained.ckpt")
    loaded = Model.load_from_checkpoint(tmp_path / "trained.ckpt")
    other = run().predict(loaded, batches())
    without = plain(torch.compile(loaded, backend="aot_eager"))
    assert loaded.state_dict().keys() == Model().state_dict().keys()
    for mine, same, too, exact, old in zip(predicted, again, other, without, before, strict=True):
        assert torch.equal(mine, same)
        assert torch.equal(mine, too)
        torch.testing.assert_close(mine.float(), exact, atol=0.05, rtol=0.05)
        assert not torch.equal(exact, old), "the training did nothing"


def test_the_page_runs(tmp_path, monkeypatch):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    monkeypatch.chdir(tmp_path)
    trained = trainer(tmp_path, epochs=1)
    trained.fit(Model(), batches())
    trained.save_checkpoint("trained.ckpt")
    quick = code.replace("Compile()", "Compile(backend='aot_eager')").replace(
        "torch.compile(", "partial(torch.compile, backend='aot_eager')("
    )
    quick = quick.replace('accelerator="auto"', 'accelerator="cpu"')
    names = {"MyModule": Model, "loader": batches(), "batch": ONES[0], "partial": partial}
    exec(compile(quick, "inference.md", "exec"), names)
    torch.testing.assert_close(names["outputs"][0].float(), names["output"].float(), atol=0.02, rtol=0.02)
