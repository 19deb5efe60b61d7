"""Lightning's Fabric: what docs/guides/fabric.md offers works there, and what cannot work is refused by name."""

import re
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

from lightning_ups import callbacks
from lightning_ups.precision import BF16Precision, BF16WeightsPrecision, Float8Precision, TEPrecision
from lightning_ups.strategies import FSDP2Strategy
from lightning_ups.transforms.activation_offload import offload_activations
from lightning_ups.transforms.blocks import find_blocks
from lightning_ups.transforms.compile import Compiler, compiled
from lightning_ups.transforms.flags import Flags, accelerated
from lightning_ups.transforms.float8 import convert_to_float8
from lightning_ups.transforms.recompute import recompute
from tests import fake_te
from tests.toys import Net

PAGE = Path(__file__).parent.parent / "docs" / "guides" / "fabric.md"
CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore")


@contextmanager
def in_float8(model, blocks):
    convert_to_float8(model, recipe="tensorwise", emulate=True)
    yield


CHANGES = {
    "compiled": lambda model, blocks: compiled(blocks, Compiler(backend="aot_eager")),
    "recompute": lambda model, blocks: recompute(blocks.values(), save="matmuls"),
    "offload_activations": lambda model, blocks: offload_activations(blocks.values(), device=CPU, min_bytes=0),
    "accelerated": lambda model, blocks: accelerated(Flags(tf32=True), device=CPU),
    "convert_to_float8": in_float8,
}


def losses(*names):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3)), nn.Linear(32, 1))
    fabric, blocks, found = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed"), find_blocks(model), []
    fabric.launch()
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(CHANGES[name](model, blocks))
        module, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        for _ in range(3):
            loss = module(torch.randn(8, 32)).square().mean()
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    return found


@pytest.mark.parametrize("name", CHANGES)
def test_each_function_of_the_page_works_in_fabric(name):
    assert f"`{name}(" in PAGE.read_text()
    assert losses(name) == pytest.approx(losses(), rel=0.1 if name == "convert_to_float8" else 1e-6)


def test_they_work_together():
    together = ("convert_to_float8", "recompute", "compiled", "offload_activations")
    assert losses(*together) == pytest.approx(losses("convert_to_float8"), rel=1e-3)


def test_the_example_of_the_page_runs():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    ran = {}
    exec(code.replace("Compiler()", 'Compiler(backend="aot_eager")').replace('"auto"', '"cpu"'), ran)
    assert ran["loss"].isfinite()


@pytest.mark.parametrize(
    ("made", "instead"),
    [
        (BF16Precision, "bf16-mixed"),
        (BF16WeightsPrecision, "bf16-true"),
        (Float8Precision, "convert_to_float8"),
        (TEPrecision, "transformer-engine"),
    ],
)
def test_a_precision_is_refused_by_name(made, instead):
    with fake_te.installed():
        fabric = Fabric(accelerator="cpu", devices=1, plugins=[made()])
        fabric.launch()
        with pytest.raises(TypeError, match=rf"{made.__name__} is a precision for Trainer.*{instead}"):
            fabric.setup(nn.Linear(16, 16))


@pytest.mark.parametrize("name", callbacks.__all__)
def test_a_callback_is_refused_by_name(name):
    made = getattr(callbacks, name)
    fabric = Fabric(accelerator="cpu", devices=1, callbacks=[made.__new__(made)])
    with pytest.raises(TypeError, match=f"^{name} is a callback for a Trainer") as error:
        fabric.setup(nn.Linear(16, 16))
    for function, module in re.findall(
        rf"^\| `{name}` \| `(\w+)\(.*` of `(\S+)`", PAGE.read_text(), flags=re.MULTILINE
    ):
        assert f"{function}() of {module}" in str(error.value)


class Forward(Net):
    def forward(self, x):
        return self.head(x)


def test_a_lightning_module_is_refused_at_its_first_backward():
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[BF16Precision()])
    model = Forward()
    module, _ = fabric.setup(model, model.configure_optimizers())
    with pytest.raises(TypeError, match="BF16Precision is a precision for Trainer"):
        fabric.backward(module(torch.randn(4, 8)).sum())


@pytest.mark.parametrize("strategy", [FSDP2Strategy, lambda: "fsdp2"])
def test_fabric_refuses_the_strategies(strategy):
    with pytest.raises(ValueError, match="invalid strategy name"):
        Fabric(accelerator="cpu", devices=1, strategy=strategy())
