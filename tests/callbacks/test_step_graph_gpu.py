"""On a GPU a replayed step gives the bits of the same step without the graph."""

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_ups.callbacks import Compile, StepGraph
from lightning_ups.models import PDEModule
from tests.callbacks.test_step_graph import CANNOT, Net, Rooted, check_same, fit

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:(?!StepGraph)")]


def exact(kind=Net, **options):
    """Return a module whose learning rates are the same in float32 and float64."""

    class Exact(kind):
        def configure_optimizers(self):
            groups = [
                {"params": [p for p in self.parameters() if p.ndim > 1], "lr": 2.0**-9},
                {"params": [p for p in self.parameters() if p.ndim < 2]},
            ]
            optimizer = torch.optim.AdamW(groups, lr=2.0**-7, **{"fused": True, **options})
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 ** (step // 5))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    return Exact


CASES = {
    "plain": {},
    "bf16": {"precision": "bf16-mixed"},
    "accumulated": {"accumulate_grad_batches": 3, "max_epochs": 6},
    "clipped": {"gradient_clip_val": 0.1},
    "outside": {"make": exact(fused=None)},
}


@pytest.mark.parametrize("case", CASES)
def test_bits_are_those_of_the_step_without_the_graph(case, tmp_path):
    options = {"make": exact(), **CASES[case]}
    check_same(tmp_path, graph=StepGraph(), accelerator="gpu", devices=1, **options)


def test_compiled_code_is_captured(tmp_path):
    check_same(
        tmp_path,
        exact(Rooted),
        more=lambda: [Compile(scope="model")],
        graph=StepGraph(),
        accelerator="gpu",
        devices=1,
        precision="bf16-mixed",
        max_epochs=6,
    )


@pytest.mark.parametrize("case", ["value", "index"])
def test_a_step_that_cannot_be_captured_is_an_error_by_name(case, tmp_path):
    make, said = CANNOT[case]
    with pytest.raises(RuntimeError, match=said):
        fit(tmp_path, make(), StepGraph(), accelerator="gpu", devices=1)
    assert torch.ones(3, device="cuda").sum().item() == 3


def test_a_pde_module_trains(tmp_path):
    data = [(torch.randn(2, 1, 1, 16, 16), torch.randn(2, 2, 1, 16, 16), torch.randn(2, 1)) for _ in range(8)]
    losses = []
    for callbacks in ([], [StepGraph()]):
        torch.manual_seed(0)
        module = PDEModule(size="tiny", conditions=1, schedule="constant", warmup_steps=0, lr=2.0**-10)
        rows = DataLoader(data, batch_size=None)
        _, seen = fit(tmp_path, module, *callbacks, data=rows, accelerator="gpu", devices=1, precision="bf16-mixed")
        losses.append([outputs["loss"].item() for outputs in seen.outputs])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert losses[1][-1] < losses[1][0]
