import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import DataLoader

from lightning_ups.callbacks import AccelerationFlags, ActivationCheckpoint, RunManifest
from lightning_ups.insight.report.manifest import difference, read
from lightning_ups.order.precision import policy_precision
from lightning_ups.precision import BF16Precision
from tests.toys import Net, data, loader, trainer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Logged(Net):
    """Has hyperparameters of its own."""

    def __init__(self, width=32, **options):
        super().__init__(**options)
        self.save_hyperparameters("width")


def fit(tmp_path, *callbacks, model=None, loader_=None, epochs=1, **options):
    manifest = RunManifest()
    run = trainer(tmp_path, callbacks=[manifest, *callbacks], epochs=epochs, **options)
    run.fit(model or Net(), loader_ or loader())
    return read(manifest.path)


def test_a_stock_trainer_gets_a_full_manifest(tmp_path):
    found = fit(tmp_path, accumulate_grad_batches=2, gradient_clip_val=0.5, loader_=loader(2))
    assert found["run"] | {"started": 0, "duration_s": 0} == {
        "kind": "fit",
        "status": "finished",
        "error": None,
        "started": 0,
        "duration_s": 0,
        "steps": 2,
        "epochs": 1,
    }
    assert found["run"]["duration_s"] > 0
    assert found["versions"]["torch"] == torch.__version__  # noqa: TID251
    assert found["host"]["cores"] == os.cpu_count()
    assert found["device"] == {"type": "cpu"}
    assert found["model"] == {
        "class": "tests.toys.Net",
        "parameters": {"trainable": sum(p.numel() for p in Net().parameters()), "frozen": 0},
        "blocks": {"count": 3, "origin": "repeated", "classes": ["Sequential"]},
    }
    assert found["precision"]["layers"] == {"Linear": {"param float32, compute float32": 7}}
    assert found["strategy"]["class"].endswith("SingleDeviceStrategy")
    assert (found["strategy"]["world_size"], found["strategy"]["mesh"]) == (1, None)
    assert found["optimizers"][0]["class"] == "torch.optim.adamw.AdamW"
    assert found["optimizers"][0]["settings"]["lr"] == 1e-2
    assert found["training"]["accumulate_grad_batches"] == 2
    assert found["training"]["gradient_clip_val"] == 0.5
    assert found["training"]["torch_seed"] == torch.initial_seed()
    assert found["batch"] == {"size": 2, "tensors": {"": "float32 [2, 8]"}}
    assert found["flags"]["attention"]
    assert found["compiled"]["graphs"] == 0
    assert found["report"] == {}
    assert found["config"] is None


def test_it_lies_beside_the_logs_and_no_run_overwrites_another(tmp_path):
    manifest = RunManifest()
    run = Trainer(
        accelerator="cpu", max_epochs=1, logger=CSVLogger(tmp_path), callbacks=[manifest], enable_progress_bar=False
    )
    paths = []
    for start in (run.fit, run.fit, run.test):
        start(Net(), loader())
        paths.append(manifest.path)
    folder = Path(run.log_dir)
    assert paths == [folder / "manifest.json", folder / "manifest-2.json", folder / "manifest-3.json"]
    assert [read(path)["run"]["kind"] for path in paths] == ["fit", "fit", "test"]


class Looking(Net):
    """Reads the manifest at every step."""

    def __init__(self, manifest):
        super().__init__()
        self.manifest, self.found = manifest, []

    def training_step(self, batch, index):
        self.found.append(read(self.manifest.path) if self.manifest.path else None)
        return super().training_step(batch, index)


def test_it_is_there_after_the_first_optimizer_step(tmp_path):
    manifest = RunManifest()
    model = Looking(manifest)
    run = trainer(tmp_path, callbacks=[manifest], epochs=1, accumulate_grad_batches=2)
    run.fit(model, loader(1))
    assert model.found[:2] == [None, None], "two batches make the first step"
    assert model.found[2]["run"]["status"] == "running"
    assert model.found[2]["run"]["steps"] == 1
    assert model.found[2] == model.found[-1], "and it is left alone until the end"
    assert read(manifest.path)["run"]["status"] == "finished"


def test_an_exception_is_written_down(tmp_path):
    manifest = RunManifest()
    with pytest.raises(RuntimeError, match="stop here"):
        trainer(tmp_path, callbacks=[manifest]).fit(Net(fail=True), loader())
    found = read(manifest.path)
    assert found["run"]["status"] == "failed"
    assert found["run"]["error"] == "RuntimeError: stop here"
    assert found["flags"], "what was in effect by then is kept"


class Broken(Net):
    def configure_model(self):
        raise ValueError("first line\nsecond line")


def test_an_exception_before_anything_was_in_effect(tmp_path):
    manifest = RunManifest()
    with pytest.raises(ValueError, match="first line"):
        trainer(tmp_path, callbacks=[manifest]).fit(Broken(), loader())
    found = read(manifest.path)
    assert found["run"]["error"] == "ValueError: first line"
    assert found["versions"]
    assert "model" not in found


class Interrupted(Net):
    def training_step(self, batch, index):
        raise KeyboardInterrupt


def test_an_interruption_is_no_failure(tmp_path):
    manifest = RunManifest()
    with pytest.raises(SystemExit):
        trainer(tmp_path, callbacks=[manifest]).fit(Interrupted(), loader())
    assert read(manifest.path)["run"]["status"] == "interrupted"


@pytest.mark.parametrize("kind", ["validate", "test", "predict"])
def test_evaluation_alone_has_one_too(tmp_path, kind):
    class Evaluated(Net):
        def validation_step(self, batch, _):
            self.head(batch)

        def predict_step(self, batch, _):
            return self.head(batch)

    manifest = RunManifest()
    run = trainer(tmp_path, callbacks=[AccelerationFlags(attention=["math"]), manifest])
    getattr(run, kind)(Evaluated(), loader(4))
    found = read(manifest.path)
    assert (found["run"]["kind"], found["run"]["status"]) == (kind, "finished")
    assert found["batch"]["size"] == 4
    assert found["flags"]["attention"] == ["math"], "while it ran, not afterwards"
    assert found["optimizers"] == []


@pytest.mark.parametrize("first", [True, False])
def test_what_the_parts_report_is_in_it_wherever_it_stands_in_the_list(tmp_path, first):
    manifest = RunManifest()
    others = [AccelerationFlags(attention=["math"], tf32=True), ActivationCheckpoint()]
    run = trainer(tmp_path, callbacks=[manifest, *others] if first else [*others, manifest], epochs=1)
    run.fit(Net(), loader())
    found = read(manifest.path)
    assert found["flags"]["attention"] == ["math"]
    assert found["report"]["AccelerationFlags"]["no_effect"] == {"tf32": "no effect on cpu"}
    assert "3 blocks" in found["report"]["ActivationCheckpoint"]["lines"][0]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_types_are_those_that_the_layers_really_have(tmp_path, precision):
    seen = {}

    class Hooked(Net):
        def on_train_start(self):
            for module in self.modules():
                if isinstance(module, nn.Linear):
                    module.register_forward_hook(self.note)

        def note(self, module, inputs, output):
            said = f"param {module.weight.dtype}, compute {output.dtype}".replace("torch.", "")
            seen.setdefault(module, said)

    found = fit(tmp_path, model=Hooked(), precision=precision)
    assert found["precision"]["name"] == precision
    assert found["precision"]["layers"] == {"Linear": {next(iter(seen.values())): 7}}
    assert len({*seen.values()}) == 1


def test_nothing_of_the_run_changes_and_it_looks_only_at_the_start(tmp_path, monkeypatch):
    looks = []
    monkeypatch.setattr("lightning_ups.callbacks.logs.run_manifest.current_flags", lambda: looks.append(1) or {})

    class Random(Net):
        def training_step(self, batch, index):
            return super().training_step(batch + torch.rand_like(batch), index)

    def losses(*callbacks):
        torch.manual_seed(5)
        model = Random()
        torch.manual_seed(6)
        shuffled = DataLoader(data(), batch_size=1, shuffle=True)
        trainer(tmp_path, callbacks=callbacks, epochs=4, precision="bf16-mixed").fit(model, shuffled)
        return torch.stack(model.losses)

    assert torch.equal(losses(), losses(RunManifest()))
    assert len(looks) == 2, "of 32 batches"


def test_two_runs_are_told_apart_by_what_took_effect(tmp_path):
    class Slow(Net):
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3, foreach=True)

    one = fit(tmp_path, AccelerationFlags())
    two = fit(tmp_path, AccelerationFlags(attention=["math"]), model=Slow())
    found = {name: pair for name, pair in difference(one, two).items() if not name.startswith("report/")}
    assert found.pop("model/class") == ("tests.toys.Net", Slow.__module__ + "." + Slow.__qualname__)
    assert found == {
        "optimizers/0/settings/lr": (1e-2, 1e-3),
        "optimizers/0/settings/foreach": (None, True),
        "flags/attention": (one["flags"]["attention"], ["math"]),
    }
    assert difference(one, fit(tmp_path, AccelerationFlags())) == {}


def test_an_optimizer_is_described_by_what_its_groups_have(tmp_path):
    class Grouped(Net):
        def configure_optimizers(self):
            groups = [
                {"params": [*self.layers.parameters()], "weight_decay": 0.1},
                {"params": [*self.head.parameters()], "weight_decay": 0.0},
            ]
            optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=7.0)
            return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)]

    for plugins in ([], [BF16Precision(weights="masters")]):
        found = fit(tmp_path, model=Grouped(), plugins=plugins)["optimizers"][0]
        assert found["class"] == "torch.optim.adamw.AdamW"
        assert found["groups"] == 2
        assert found["settings"]["weight_decay"] == [0.1, 0.0]
        assert found["settings"]["lr"] == 1e-2, "not what the schedule makes of it at this moment"
        assert found["settings"]["betas"] == [0.9, 0.999]
        assert found.get("by", "").endswith("MasteredOptimizer") == bool(plugins)


# The loggers


def shown_by_tensorboard(folder):
    """What TensorBoard's hyperparameter page has for each run below ``folder``."""
    from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
    from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
    from tensorboard.context import RequestContext
    from tensorboard.plugins.base_plugin import TBContext
    from tensorboard.plugins.hparams import metadata
    from tensorboard.plugins.hparams.backend_context import Context

    multiplexer = EventMultiplexer()
    multiplexer.AddRunsFromDirectory(str(folder))
    multiplexer.Reload()
    context = Context(TBContext(multiplexer=multiplexer, data_provider=MultiplexerDataProvider(multiplexer, "")))
    found = {}
    for run, tags in context.hparams_metadata(RequestContext(), "").items():
        said = metadata.parse_session_start_info_plugin_data(tags["_hparams_/session_start_info"])
        found[run] = {name: getattr(value, value.WhichOneof("kind")) for name, value in said.hparams.items()}
    return found


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_compares_two_runs_by_the_manifest_and_the_modules_own(tmp_path):
    for number, width in enumerate((32, 64)):
        callbacks = [RunManifest(), AccelerationFlags(attention=["math"] if number else None)]
        board = TensorBoardLogger(tmp_path, name="")
        trainer(tmp_path, callbacks=callbacks, epochs=1, logger=board).fit(Logged(width), loader())
    shown = shown_by_tensorboard(tmp_path)
    assert [run["width"] for run in shown.values()] == [32, 64]
    assert [run["manifest/flags/attention"] for run in shown.values()][1] == "['math']"
    for run in shown.values():
        assert run["manifest/model/blocks/count"] == 3
        assert run["manifest/precision/layers/Linear/param float32 compute float32"] == 7
        assert run["manifest/optimizers/0/class"] == "torch.optim.adamw.AdamW"


def test_tensorboard_gets_no_metric_that_nobody_measured(tmp_path):
    board = TensorBoardLogger(tmp_path)
    trainer(tmp_path, callbacks=[RunManifest()], epochs=1, logger=board).fit(Net(), loader())
    assert "hp_metric" not in EventAccumulator(board.log_dir).Reload().Tags()["scalars"]
    (shown,) = shown_by_tensorboard(tmp_path).values()
    assert shown["manifest/strategy/world_size"] == 1


def hparams(tmp_path, callback, **options):
    logger = CSVLogger(tmp_path)
    trainer(tmp_path, callbacks=[callback], epochs=1, logger=logger, **options).fit(Logged(), loader())
    path = Path(logger.log_dir) / "hparams.yaml"
    return yaml.safe_load(path.read_text()) if path.exists() else {}


def test_other_loggers_get_the_same(tmp_path):
    found = hparams(tmp_path, RunManifest())
    assert found["width"] == 32
    assert found["manifest/strategy/world_size"] == 1


def test_who_wants_no_hyperparameters_gets_none(tmp_path):
    assert set(hparams(tmp_path, RunManifest(log_hyperparams=False))) == {"width"}
    assert not hparams(tmp_path, RunManifest(), enable_autolog_hparams=False)


# Where


def test_a_trial_of_the_code_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for options in ({"fast_dev_run": True}, {"barebones": True, "max_epochs": 1}):
        manifest = RunManifest()
        Trainer(accelerator="cpu", callbacks=[manifest], enable_progress_bar=False, **options).fit(Net(), loader())
        assert manifest.path is None
        assert manifest.manifest["run"]["status"] == "finished", "and it is known all the same"
    assert not [*tmp_path.rglob("manifest*.json")]


def test_a_folder_that_cannot_be_written_does_not_stop_training(tmp_path):
    blocked, manifest, model = tmp_path / "file", RunManifest(), Net()
    blocked.write_text("not a folder")
    with pytest.warns(UserWarning, match="The run continues.*give the Trainer another default_root_dir"):
        trainer(blocked / "logs", callbacks=[manifest], epochs=1).fit(model, loader())
    assert len(model.losses) == 1
    assert manifest.manifest["run"]["status"] == "finished"


@pytest.mark.filterwarnings("ignore")
def test_the_command_lines_configuration_is_in_it_without_secrets(tmp_path, monkeypatch):
    from lightning.pytorch.cli import LightningCLI

    class Secretive(Net):
        def __init__(self, api_key: str = "", max_tokens: int = 3):
            super().__init__()

        def train_dataloader(self):
            return loader()

    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    settings = tmp_path / "run.yaml"
    settings.write_text(
        f"trainer: {{max_epochs: 1, accelerator: cpu, enable_progress_bar: false, default_root_dir: {tmp_path}}}"
    )
    manifest = RunManifest()
    LightningCLI(
        Secretive,
        args=["fit", "--model.api_key=s3cret", f"--config={settings}"],
        trainer_defaults={"callbacks": [manifest]},
    )
    found = read(manifest.path)
    assert found["config"]["model"] == {"api_key": "***", "max_tokens": 3}
    assert found["config"]["trainer"]["max_epochs"] == 1
    assert found["environment"]["NCCL_DEBUG"] == "WARN"
    assert "s3cret" not in manifest.path.read_text()


def test_the_working_tree_is_that_of_the_users_folder(tmp_path, monkeypatch):
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    monkeypatch.chdir(tmp_path)
    subprocess.run(["git", "init", "-q"], check=True)
    subprocess.run(["git", *identity, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    assert len(fit(tmp_path)["code"]["commit"]) == 40


def two_ranks(folder, sharded):
    from lightning.pytorch.strategies import DDPStrategy

    manifest = RunManifest()
    strategy = DDPStrategy(process_group_backend="gloo") if not sharded else "fsdp2"
    run = trainer(Path(folder), callbacks=[manifest], epochs=1, devices=2, strategy=strategy, precision="bf16-mixed")
    run.fit(Net(), loader(4))
    return str(manifest.path), run.strategy.broadcast(None if run.is_global_zero else str(manifest.path), src=1)


@pytest.mark.parametrize("sharded", [False, True])
def test_rank_zero_writes_and_it_alone(ranks, tmp_path, sharded):
    path, others = ranks(two_ranks, str(tmp_path), sharded)
    assert others == "None"
    assert [p.name for p in tmp_path.rglob("*.json")] == [Path(path).name]
    found = json.loads(Path(path).read_text())
    assert found["strategy"]["world_size"] == 2
    assert found["model"]["class"].endswith("toys.Net")
    assert found["model"]["parameters"]["trainable"] == sum(p.numel() for p in Net().parameters()), "whole, not a shard"
    assert found["precision"]["layers"] == {"Linear": {"param float32, compute bfloat16": 7}}
    if sharded:
        assert found["strategy"]["mesh"]


@pytest.mark.gpu
def test_a_gpu_is_described(tmp_path):
    manifest = RunManifest()
    run = trainer(tmp_path, callbacks=[manifest], epochs=1, accelerator="gpu", devices=1, precision="bf16-mixed")
    run.fit(Net(), loader())
    found = read(manifest.path)
    assert found["device"]["gpus"][0]["name"] == torch.cuda.get_device_name()
    assert found["versions"]["cudnn"]
    assert found["flags"]["allocator"]
    assert found["precision"]["layers"] == {"Linear": {"param float32, compute bfloat16": 7}}


def test_a_lazy_module_is_described_before_it_is_made(tmp_path):
    class Lazy(Net):
        def __init__(self):
            super().__init__()
            self.head = nn.LazyLinear(1)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=torch.tensor(0.125))

    manifest = RunManifest()
    trainer(tmp_path, callbacks=[manifest], epochs=1).fit(Lazy(), loader())
    assert manifest.manifest["model"]["parameters"]["not_made_yet"] == 2
    assert manifest.manifest["optimizers"][0]["settings"]["lr"] == 0.125


def test_a_batch_may_be_a_dataclass(tmp_path):
    class Takes(Net):
        def training_step(self, batch, index):
            return super().training_step(batch.x, index)

    data = DataLoader([Sample(torch.randn(8)) for _ in range(4)], batch_size=2, collate_fn=together)
    manifest = RunManifest()
    trainer(tmp_path, callbacks=[manifest], epochs=1).fit(Takes(), data)
    assert manifest.manifest["batch"] == {"size": 2, "tensors": {"x": "float32 [2, 8]"}}


@dataclass
class Sample:
    x: torch.Tensor


def together(samples):
    return Sample(torch.stack([sample.x for sample in samples]))


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_batch_may_be_nested(tmp_path, layout):
    class Takes(Net):
        def training_step(self, batch, _):
            return super().training_step(batch.to_padded_tensor(0.0).mean(1), 0)

    batch = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)], layout=layout)
    found = fit(tmp_path, model=Takes(), loader_=DataLoader([batch], batch_size=None))["batch"]
    assert found["size"] == 2
    (said,) = found["tensors"].values()
    assert said.startswith("float32 [2, ")


def test_what_cannot_be_read_ends_no_run(tmp_path, monkeypatch):
    def broken(*_, **__):
        raise LookupError("a class that nobody knows")

    for name in ("layer_dtypes", "find_blocks", "tensors_of"):
        monkeypatch.setattr(f"lightning_ups.callbacks.logs.run_manifest.{name}", broken)
    with pytest.warns(
        UserWarning, match=r"^RunManifest could not read the model: LookupError: a class .*run continues"
    ):
        found = fit(tmp_path)
    assert found["run"]["status"] == "finished"
    for part in ("model", "precision", "batch"):
        assert found[part] == {"not_read": "LookupError: a class that nobody knows"}
    assert found["optimizers"][0]["class"].endswith("AdamW")


def test_nothing_is_said_of_a_precision_that_ran_no_step(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(policy_precision, "rank_zero_info", said.append)
    run = trainer(tmp_path, callbacks=[RunManifest()], plugins=[BF16Precision()])
    net = Net()
    net.validation_step = net.training_step
    run.validate(net, [])
    assert said == []
