import csv
from dataclasses import replace

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_ups.callbacks import ActivationCheckpoint, Compile, ExactResume
from lightning_ups.data.fields import GeneratedFields
from lightning_ups.models.pde import SIZES, PDEConfig, PDEModule, PDETransformer
from lightning_ups.precision import BF16Precision
from lightning_ups.strategies import FSDP2Strategy

SMALL = PDEConfig(dim=16, depths=(2, 2), head_dim=8, condition_dim=16, patch=2, window=4)


def random_model(**options):
    torch.manual_seed(0)
    model = PDETransformer(replace(SMALL, **options))
    for module in (model.head, *(block.condition for block in model.modules() if hasattr(block, "attention"))):
        nn.init.normal_(module.weight, std=0.1)  # they begin at zero
    return model


class TestTransformer:
    @pytest.mark.parametrize(("size", "millions"), {"10M": 10, "30M": 30, "130M": 130}.items())
    def test_sizes_are_what_they_are_called(self, size, millions):
        with torch.device("meta"):
            model = PDETransformer(SIZES[size])
        assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.05)

    @pytest.mark.parametrize("size", ["10M", "30M", "130M"])
    def test_sizes_compute(self, size):
        with torch.device("meta"):
            found = PDETransformer(replace(SIZES[size], conditions=2))(torch.empty(2, 1, 1, 64, 64), torch.empty(2, 2))
        assert found.shape == (2, 1, 64, 64)

    def test_at_first_nothing_changes(self):
        torch.manual_seed(0)
        frames = torch.randn(2, 1, 1, 16, 16)
        assert torch.equal(PDETransformer(SMALL)(frames, torch.zeros(2, 0)), frames[:, -1])

    @pytest.mark.parametrize("axes", [1, 2])
    @pytest.mark.parametrize("conditions", [0, 3])
    def test_channels_frames_and_axes(self, axes, conditions):
        model = random_model(axes=axes, channels=3, inputs=2, conditions=conditions)
        for grid in ([16], [32]) if axes == 1 else ([16, 16], [32, 16]):
            frames = torch.randn(2, 2, 3, *grid)
            assert model(frames, torch.randn(2, conditions)).shape == (2, 3, *grid)

    def test_no_place_of_a_periodic_domain_is_special(self):
        model, frames, known = random_model(), torch.randn(2, 1, 1, 32, 32), torch.zeros(2, 0)
        moved = model(frames.roll((16, 16), dims=(-1, -2)), known)
        torch.testing.assert_close(moved, model(frames, known).roll((16, 16), dims=(-1, -2)))

    def test_windows_are_shifted(self):
        """Without shifts, information would cross their borders through 3 x 3 tokens only."""
        model, frames = random_model(depths=(2,)), torch.randn(1, 1, 1, 32, 32, requires_grad=True)
        model(frames, torch.zeros(1, 0))[0, 0, 0, 0].backward()
        reached = frames.grad[0, 0, 0] != 0
        assert reached[-6, -6]
        assert not reached[16, 16]

    @pytest.mark.parametrize("axes", [1, 2])
    def test_an_open_boundary_joins_no_opposite_edges(self, axes):
        for boundary in ("periodic", "open"):
            # One resolution and two blocks reach at most two windows and some tokens, less than the domain.
            model = random_model(axes=axes, depths=(2,), boundary=boundary)
            frames = torch.randn(1, 1, 1, *[64] * axes, requires_grad=True)
            model(frames, torch.zeros(1, 0)).flatten()[0].backward()
            reached = frames.grad.flatten(0, 2)[0]
            corner = reached[-1] if axes == 1 else reached[-1, -1]
            assert (corner != 0) == (boundary == "periodic")

    def test_conditions_matter(self):
        model, frames = random_model(conditions=1), torch.randn(1, 1, 1, 16, 16)
        assert not torch.equal(model(frames, torch.zeros(1, 1)), model(frames, torch.ones(1, 1)))

    def test_a_rollout_is_its_steps(self):
        model, frames, known = random_model(inputs=2), torch.randn(1, 2, 1, 16, 16), torch.zeros(1, 0)
        first = model(frames, known)
        second = model(torch.stack([frames[:, 1], first], dim=1), known)
        torch.testing.assert_close(model.rollout(frames, known, steps=2), torch.stack([first, second], dim=1))

    def test_a_detached_rollout_has_the_gradient_of_its_last_step_alone(self):
        model, frames, known = random_model(), torch.randn(1, 1, 1, 16, 16), torch.zeros(1, 0)
        gradients = []
        for detach in (True, False, None):
            start = model(frames, known).detach()[:, None] if detach is None else frames
            found = model.rollout(start, known, steps=1 if detach is None else 2, detach=bool(detach))
            gradients.append(torch.autograd.grad(found[:, -1].square().sum(), model.head.weight)[0])
        torch.testing.assert_close(gradients[0], gradients[2])
        assert not torch.allclose(gradients[0], gradients[1])

    def test_grids_that_do_not_divide_are_refused(self):
        with pytest.raises(ValueError, match="multiples of 4"):
            random_model()(torch.randn(1, 1, 1, 18, 16), torch.zeros(1, 0))

    @pytest.mark.parametrize("wrong", [{"boundary": "wall"}, {"axes": 3}, {"dim": 20}, {"channels": 0}])
    def test_wrong_shapes_are_refused(self, wrong):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            replace(SMALL, **wrong)


def data(tmp_path, **options):
    small = {"points": 16, "trajectories": 4, "val_trajectories": 2, "frames": 7, "batch_size": 4, "val_targets": 3}
    return GeneratedFields(**{**small, "cache_dir": str(tmp_path / "cache"), **options})


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch):
    monkeypatch.setattr("lightning_ups.models.pde.SIZES", {**SIZES, "tiny": SMALL})


def trainer(tmp_path, **options):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0, "logger": False}
    quiet |= {"accelerator": "cpu", "devices": 1, "default_root_dir": tmp_path, "enable_checkpointing": False}
    return Trainer(**{**quiet, **options})


def losses(tmp_path, *callbacks, plugins=(), **options):
    seed_everything(0, verbose=False)
    module = PDEModule(conditions=1, warmup_steps=2, **options)
    seen, step = [], module.training_step
    module.training_step = lambda *args: seen.append(step(*args)) or seen[-1]
    made = trainer(tmp_path, max_steps=3, limit_val_batches=0, callbacks=[*callbacks], plugins=[*plugins])
    made.fit(module, data(tmp_path, targets=2))
    return torch.stack(seen).tolist()


@pytest.mark.filterwarnings("ignore")
class TestModule:
    def test_it_learns(self, tmp_path):
        seed_everything(0, verbose=False)
        module = PDEModule(conditions=1, lr=1e-2, warmup_steps=5)
        made = trainer(tmp_path, max_steps=60, check_val_every_n_epoch=None, val_check_interval=60)
        made.fit(module, data(tmp_path, trajectories=16))
        found = made.callback_metrics
        assert found["val_nrmse"] < 0.95 * found["val_unchanged"]
        assert found["val_nrmse_rollout"] < 0.95 * found["val_unchanged_rollout"]
        assert found["val_correlation_steps"] >= 1
        whole = sum(found[name] ** 2 for name in ("val_low", "val_middle", "val_high")) ** 0.5
        assert whole == pytest.approx(found["val_nrmse_rollout"].item(), rel=0.2)

    @pytest.mark.parametrize("options", [{"detach": True}, {"high_frequency_weight": 0.5, "high_frequency": 3}])
    def test_options_change_the_run_and_it_is_finite(self, tmp_path, options):
        plain, other = losses(tmp_path), losses(tmp_path, **options)
        assert other != plain
        assert torch.tensor(other).isfinite().all()

    def test_callbacks_find_its_blocks_and_change_no_loss(self, tmp_path):
        plain = losses(tmp_path)
        assert losses(tmp_path, ActivationCheckpoint(save="nothing")) == plain
        assert losses(tmp_path, Compile(backend="aot_eager")) == pytest.approx(plain, rel=1e-5)

    def test_muon_trains_with_callbacks_and_in_bfloat16(self, tmp_path):
        plain = losses(tmp_path, optimizer="muon")
        assert plain[1:] != losses(tmp_path)[1:]
        assert losses(tmp_path, ActivationCheckpoint(save="nothing"), optimizer="muon") == plain
        assert losses(tmp_path, Compile(backend="aot_eager"), optimizer="muon") == pytest.approx(plain, rel=1e-5)
        for precision in (BF16Precision(), BF16Precision(weights="masters")):
            assert losses(tmp_path, plugins=[precision], optimizer="muon") == pytest.approx(plain, rel=0.02)

    def test_in_bfloat16_the_losses_are_close(self, tmp_path):
        """Spectra are computed in float32: FFTs have no bfloat16."""
        options = {"high_frequency_weight": 0.5, "high_frequency": 3}
        found = losses(tmp_path, plugins=[BF16Precision()], **options)
        assert found == pytest.approx(losses(tmp_path, **options), rel=0.02)

    def test_other_data_is_refused_with_the_arguments_that_fit(self, tmp_path):
        with pytest.raises(ValueError, match=r"PDEModule\(channels=2, conditions=2\)"):
            trainer(tmp_path, max_steps=1).fit(PDEModule(), data(tmp_path, equation="gray_scott"))
        with pytest.raises(ValueError, match=r"PDEModule\(conditions=1, axes=1\)"):
            trainer(tmp_path, max_steps=1).fit(PDEModule(), data(tmp_path, equation="burgers", points=32))

    def test_pictures_are_in_tensorboard_and_metrics_in_tables(self, tmp_path):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        loggers = [TensorBoardLogger(tmp_path, name="board"), CSVLogger(tmp_path, name="table")]
        made = trainer(tmp_path, max_steps=2, check_val_every_n_epoch=None, val_check_interval=2, logger=loggers)
        made.fit(PDEModule(conditions=2, channels=3), data(tmp_path, equation="shallow_water"))
        events = EventAccumulator(loggers[0].log_dir).Reload()
        fields = ("depth", "velocity_x", "velocity_y")
        assert {*events.Tags()["images"]} == {f"{kind}/{f}" for kind in ("rollout", "rollout_video") for f in fields}
        (image,) = events.Images("rollout/depth")
        assert (image.step, image.width, image.height) == (2, 3 * 16 + 2 * 2, 3 * 16 + 2 * 2)
        (table,) = tmp_path.rglob("metrics.csv")
        row = [row for row in csv.DictReader(table.read_text().splitlines()) if row.get("val_nrmse")][-1]
        assert {"val_low", "val_middle", "val_high", "val_unchanged", "val_correlation_steps"} < row.keys()

    def test_the_average_of_weights_is_validated(self, tmp_path):
        seen = []

        class Module(PDEModule):
            def on_validation_epoch_start(self):
                seen.append(self.model.head.weight.detach().clone())

        seed_everything(0, verbose=False)
        module, average = Module(conditions=1, lr=1e-2, warmup_steps=1), EMAWeightAveraging(decay=0.5)
        trained = []
        module.on_train_batch_end = lambda *_: trained.append(module.model.head.weight.detach().clone())
        made = trainer(tmp_path, max_steps=2, check_val_every_n_epoch=None, val_check_interval=2, callbacks=[average])
        made.fit(module, data(tmp_path))
        assert not torch.equal(seen[-1], trained[-1])
        torch.testing.assert_close(seen[-1], (trained[0] + trained[1]) / 2)

    @pytest.mark.parametrize("optimizer", ["adamw", "muon"])
    def test_a_resumed_run_is_the_same_bit_for_bit(self, tmp_path, optimizer):
        def run(steps, *, ckpt_path=None):
            seed_everything(0 if ckpt_path is None else 1, verbose=False)
            module, saving = PDEModule(conditions=1, warmup_steps=2, schedule="constant", optimizer=optimizer), []
            if ckpt_path is None:
                saving = [ModelCheckpoint(tmp_path / "c", filename="{step}", every_n_train_steps=3, save_top_k=-1)]
            callbacks = [ExactResume(), EMAWeightAveraging(decay=0.9), *saving]
            made = trainer(
                tmp_path, max_steps=steps, limit_val_batches=0, callbacks=callbacks, enable_checkpointing=bool(saving)
            )
            made.fit(module, data(tmp_path, targets=2), ckpt_path=ckpt_path, weights_only=False)
            return module.state_dict()

        straight = run(8)  # more than an epoch of five batches
        resumed = run(8, ckpt_path=tmp_path / "c" / "step=3.ckpt")
        assert all(torch.equal(value, resumed[name]) for name, value in straight.items())


def muon_on_ranks(path):
    def run(way, steps, **options):
        seed_everything(0, verbose=False)
        module = PDEModule(conditions=1, warmup_steps=0, schedule="constant", lr=1e-2, optimizer="muon")
        start = module.model.middle[0].mlp[0].weight.detach().clone()
        made = trainer(path, max_steps=steps, limit_val_batches=0, strategy=way, devices=2)
        made.fit(module, data(path, trajectories=8), **options)
        made.save_checkpoint(path / "last")
        found = module.model.middle[0].mlp[0].weight.detach()
        return (found.full_tensor() if isinstance(found, DTensor) else found) - start

    found = run("ddp", 4), run(FSDP2Strategy(), 4)
    run(FSDP2Strategy(), 5, ckpt_path=path / "last")
    return found


@pytest.mark.filterwarnings("ignore")
def test_muon_steps_shards_as_whole_matrices(ranks, tmp_path):
    replicated, sharded = ranks(muon_on_ranks, tmp_path)
    assert (sharded - replicated).norm() < 0.2 * replicated.norm()  # Muon multiplies in bfloat16


def on_ranks(path):
    seed_everything(0, verbose=False)
    made = trainer(path, max_steps=2, strategy="ddp", devices=2, check_val_every_n_epoch=None, val_check_interval=2)
    made.fit(PDEModule(conditions=1), data(path))
    return {name: value.item() for name, value in made.callback_metrics.items()}


@pytest.mark.filterwarnings("ignore")
def test_two_ranks_train_and_agree_about_metrics(ranks, tmp_path):
    found = ranks(on_ranks, tmp_path)
    assert {"val_nrmse", "val_low", "val_correlation_steps"} < found.keys()
