"""The precision makes AdamW's step where it can; on CPUs the step's specification stands in for the kernel."""

import pytest
import torch
from torch.optim import AdamW
from torch.optim.lr_scheduler import ExponentialLR

from lightning_ups.callbacks import Compile
from lightning_ups.optim import adamw_step
from lightning_ups.precision import BF16Precision
from tests.strategies.cases import Case, losses_of, weights_of
from tests.toys import loader, trainer

STEPS = 5

pytestmark = pytest.mark.filterwarnings(
    "ignore:You defined a `validation_step`", "ignore:The 'train_dataloader' does not"
)


class Net(Case):
    """Two groups, a scheduler, and hooks that count."""

    calls = 0

    def configure_optimizers(self):
        matrices = [p for p in self.parameters() if p.ndim > 1]
        vectors = [p for p in self.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 3e-2}]
        optimizer = AdamW(groups, lr=1e-2)
        optimizer.register_step_post_hook(lambda *_: setattr(self, "calls", self.calls + 1))
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": ExponentialLR(optimizer, 0.9), "interval": "step"},
        }


def fit(tmp_path, *, one_kernel, strategy="auto", devices=1, checkpoint=None, epochs=STEPS, **options):
    steps = []
    with pytest.MonkeyPatch.context() as patch:
        if one_kernel:
            patch.setattr(adamw_step, "_has_kernel", lambda device: True)
            step = adamw_step.reference_step
            patch.setattr(adamw_step, "reference_step", lambda *a, **k: (steps.append(1), step(*a, **k)))
        model = Net()
        run = trainer(tmp_path, epochs=epochs, strategy=strategy, devices=devices, gradient_clip_val=0.1, **options)
        run.fit(model, loader(8 // devices), ckpt_path=checkpoint)
    state = run.optimizers[0].state_dict()
    result = {"losses": losses_of(model, len(model.losses)), "weights": weights_of(model), "calls": model.calls}
    return run, result | {"steps": len(steps), "keys": [[*group] for group in state["state"].values()]}


def assert_equal(result, expected):
    assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert expected["losses"][-1] < expected["losses"][0]
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(result["weights"][name], weight, rtol=1e-4, atol=1e-6)
    assert result["calls"] == expected["calls"] == STEPS
    assert result["keys"] == expected["keys"]
    assert expected["steps"] == 0
    assert result["steps"] >= STEPS * 2, "a step for each group"


@pytest.mark.parametrize(("weights", "callbacks"), [("autocast", [Compile(backend="eager")]), ("masters", [])])
def test_on_one_device_the_step_is_that_of_the_optimizer(tmp_path, weights, callbacks):
    results = []
    for one_kernel in (False, True):
        plugins = [BF16Precision(weights=weights)]
        run, result = fit(tmp_path, one_kernel=one_kernel, plugins=plugins, callbacks=callbacks)
        results.append(result)
    expected, result = results
    # bfloat16 weights part where masters differ in the last bit and round to other neighbours.
    assert result["losses"] == pytest.approx(expected["losses"], rel=1e-4 if weights == "autocast" else 2e-2)
    assert expected["steps"] == 0
    assert result["steps"] >= STEPS * 2, "a step for each group"
    assert result["calls"] == expected["calls"] == STEPS
    assert run.lr_scheduler_configs[0].scheduler.last_epoch == STEPS


def test_without_a_compiler_autocast_leaves_the_step_to_torch(tmp_path):
    _, expected = fit(tmp_path, one_kernel=False, precision="bf16-mixed")
    _, result = fit(tmp_path, one_kernel=True, plugins=[BF16Precision()])
    assert result["steps"] == 0
    assert result["losses"] == expected["losses"]
    assert all(torch.equal(result["weights"][name], weight) for name, weight in expected["weights"].items())


def on_ranks(tmp_path, one_kernel):
    from lightning_ups.strategies import FSDP2Strategy

    return fit(tmp_path, one_kernel=one_kernel, strategy=FSDP2Strategy(), devices=2)[1]


def test_under_fsdp2_each_rank_steps_its_shards(ranks, tmp_path):
    assert_equal(ranks(on_ranks, tmp_path, True), ranks(on_ranks, tmp_path, False))


def test_the_other_step_resumes_a_checkpoint(tmp_path):
    plugins = {"plugins": [BF16Precision()], "callbacks": [Compile(backend="eager")]}
    _, whole = fit(tmp_path, one_kernel=False, **plugins)
    for first, second in ((True, False), (False, True)):
        run, _ = fit(tmp_path, one_kernel=first, epochs=2, **plugins)
        run.save_checkpoint(tmp_path / "middle.ckpt")
        _, rest = fit(tmp_path, one_kernel=second, checkpoint=tmp_path / "middle.ckpt", **plugins)
        assert rest["losses"] == pytest.approx(whole["losses"][2:], rel=1e-4)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_closure_without_gradients_leaves_everything(tmp_path):
    class Idle(Net):
        def training_step(self, batch, _):
            self.losses.append(torch.zeros(()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adamw_step, "_has_kernel", lambda device: True)
        model = Idle()
        before = weights_of(model)
        options = {"plugins": [BF16Precision()], "callbacks": [Compile(backend="eager")]}
        trainer(tmp_path, epochs=1, **options).fit(model, loader())
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(model).items())
