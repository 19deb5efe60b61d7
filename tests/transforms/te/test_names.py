import pytest
import torch

from lightning_ups.models.gpt import GPT, SIZES
from lightning_ups.transforms.te.convert import convert_to_te
from lightning_ups.transforms.te.names import from_te_names, to_te_names
from tests import fake_te

LAYOUTS = {
    "ffn": {
        "layer_norm_weight": ("norm.weight",),
        "fc1_weight": ("ffn.gate.weight", "ffn.up.weight"),
        "fc2_weight": ("ffn.down.weight",),
    }
}


def tensors():
    torch.manual_seed(0)
    shapes = {"norm.weight": (4,), "ffn.gate.weight": (6, 4), "ffn.up.weight": (6, 4), "ffn.down.weight": (4, 6)}
    return {name: torch.randn(shape) for name, shape in shapes.items()} | {"head.weight": torch.randn(2, 4)}


def test_there_and_back():
    ours = tensors()
    theirs = to_te_names(ours, LAYOUTS)
    assert theirs.keys() == {"ffn.layer_norm_weight", "ffn.fc1_weight", "ffn.fc2_weight", "head.weight"}
    assert torch.equal(theirs["ffn.fc1_weight"][:6], ours["ffn.gate.weight"])  # the half that is activated
    back = from_te_names(theirs | {"ffn._extra_state": torch.empty(0)}, LAYOUTS, like=ours)
    assert back.keys() == ours.keys()
    assert all(torch.equal(back[name], value) for name, value in ours.items())


def test_a_conversion_has_such_layouts():
    with fake_te.installed():
        model = GPT(SIZES["tiny"])
        layouts, state = convert_to_te(model).layouts, model.state_dict()
    theirs = to_te_names(state, layouts)
    assert "layers.0.attention.qkv.layer_norm_weight" in theirs
    back = from_te_names(theirs, layouts, like=state)
    assert all(torch.equal(back[name], value) for name, value in state.items())


def test_half_a_product_is_refused():
    part = {name: value for name, value in tensors().items() if name != "ffn.up.weight"}
    with pytest.raises(KeyError, match=r"ffn\.up\.weight"):
        to_te_names(part, LAYOUTS)


def test_an_optimizer_without_some_of_them():
    frozen = {"head.weight": torch.zeros(2, 4)}
    assert to_te_names(frozen, LAYOUTS).keys() == {"head.weight"}
