import pytest
import torch

from lightning_ups._compat.torch.tensors import attention
from lightning_ups.kernels.attention import support
from lightning_ups.kernels.attention.support import BACKENDS, Kind, check, kind_of, refusal

CPU = Kind("cpu", torch.float32, 4, 2, 64, 64, causal=True)
H200 = CPU._replace(device="cuda", dtype=torch.bfloat16)


@pytest.fixture
def on(monkeypatch):
    """Pretend a device of some compute capability, every package, and a torch that refuses nothing."""

    def pretend(major, torch_says=None):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (major, 0))
        monkeypatch.setattr(support, "missing_package", lambda _: None)
        monkeypatch.setattr(support, "_torch_refuses", lambda *_: torch_says)

    return pretend


@pytest.fixture
def without_fa4(monkeypatch):
    """Hide FlashAttention-4, which the machine may have."""
    monkeypatch.setattr(attention, "_FA4", "flash-attn-4>=99")
    attention.load_fa4.cache_clear()
    yield
    attention.load_fa4.cache_clear()


def able(kind):
    return {backend for backend in BACKENDS if refusal(backend, kind) is None}


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({}, {"reference", "math", "flash"}),
        ({"trains": False}, {"reference", "math", "flash", "flex"}),
        ({"window": True, "documents": True}, {"reference", "math", "flash"}),
        ({"softcap": True}, {"reference"}),
        ({"mask": True}, {"math", "flash"}),
        ({"mask": True, "mask_trains": True}, {"math"}),
        ({"dropout": True}, {"math"}),
        ({"square": False}, {"math"}),
        ({"square": False, "causal": False}, {"reference", "math", "flash"}),
        ({"value_dim": 32}, {"reference", "math"}),
        ({"device": "mps"}, {"reference", "math"}),
    ],
)
def test_on_cpu(change, wanted):
    assert able(CPU._replace(**change)) == wanted


EVERYTHING = set(BACKENDS)


@pytest.mark.parametrize(
    ("major", "change", "cannot"),
    [
        (9, {}, set()),
        (9, {"dtype": torch.float32}, {"flash", "cudnn", "fa3", "fa4"}),
        (9, {"window": True}, {"cudnn"}),
        (9, {"one_key": True}, {"cudnn"}),
        (9, {"documents": True, "head_dim": 60, "value_dim": 60}, {"cudnn", "flash", "fa3", "fa4"}),
        (9, {"softcap": True}, {"cudnn", "flash", "efficient", "math"}),
        (9, {"mask": True}, {"reference", "flash", "flex", "fa3", "fa4"}),
        (9, {"dropout": True}, {"reference", "flex", "fa3", "fa4"}),
        (9, {"head_dim": 512, "value_dim": 512}, {"fa3", "fa4"}),
        (10, {}, {"fa3"}),
        (10, {"head_dim": 192, "value_dim": 192}, {"fa3", "fa4"}),
        (10, {"head_dim": 256, "value_dim": 256, "softcap": True}, EVERYTHING - {"flex", "reference"}),
        (8, {}, {"fa3", "fa4"}),
        (8, {"trains": False}, {"fa3"}),
        (7, {"trains": False}, {"fa3", "fa4"}),
    ],
)
def test_on_gpus(on, major, change, cannot):
    on(major)
    assert EVERYTHING - able(H200._replace(**change)) == cannot


def test_torch_is_asked_about_its_kernels(on):
    on(9, torch_says="head_dim should be no more than 128")
    assert EVERYTHING - able(H200) == {"cudnn", "flash", "efficient"}
    with pytest.raises(ValueError, match=r"no more than 128. Use another backend, or 'auto'"):
        check("cudnn", H200)


@pytest.mark.parametrize("rule", support._RULES, ids=lambda rule: rule.why[:40])
def test_every_rule_has_a_reason_and_a_cure_that_format(on, rule):
    on(9)
    assert rule.why.format(kind=CPU)[0].isupper()
    assert rule.cure[0].isupper()
    assert not rule.cure.endswith(".")


def test_the_error_says_what_why_and_the_cure():
    with pytest.raises(ValueError, match=r"backend 'fa4' cannot be used here.*on 'cpu'\. Move the tensors to a GPU"):
        check("fa4", CPU)


@pytest.mark.usefixtures("without_fa4")
def test_a_missing_package_is_named_with_its_extra(on, monkeypatch):
    on(9)
    check.cache_clear()
    with pytest.raises(ModuleNotFoundError, match="pip install 'flash-attn-4"):
        check("fa4", H200)
    with pytest.raises(ModuleNotFoundError, match=r"Build it by .*, or use backend 'fa4'"):
        check("fa3", H200)
    monkeypatch.undo()
    on = able(CPU)
    assert "fa4" not in on


@pytest.mark.usefixtures("without_fa4")
def test_auto_leaves_out_what_is_not_installed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(support, "_torch_refuses", lambda *_: None)
    assert refusal("fa4", H200)[0].startswith("flash-attn-4")
    assert refusal("fa3", H200)[0].startswith("flash_attn_interface")


def test_a_kind_has_no_lengths():
    def kind(batch, seq):
        q, k = torch.zeros(batch, seq, 4, 16), torch.zeros(batch, seq, 2, 16)
        return kind_of(q, k, k, causal=True)

    assert kind(1, 5) == kind(3, 9)


def test_gradients_are_wanted_where_one_requires_them_and_they_are_on():
    q, k = torch.zeros(1, 5, 4, 16), torch.zeros(1, 5, 4, 16, requires_grad=True)
    assert kind_of(q, k, q, causal=True).trains
    assert not kind_of(q, q, q, causal=True).trains
    with torch.no_grad():
        assert not kind_of(q, k, q, causal=True).trains


def test_masks_and_lengths():
    q, k = torch.zeros(1, 5, 4, 16), torch.zeros(1, 6, 4, 16)
    kind = kind_of(q, k, k, causal=False, mask=torch.zeros(5, 6, requires_grad=True))
    assert (kind.square, kind.mask, kind.mask_trains) == (False, True, True)


def test_it_is_constant_where_sizes_are_symbolic():
    kinds = []

    @torch.compiler.assume_constant_result
    def keep(kind):
        kinds.append(kind)
        return 1

    def function(q):
        return q * keep(tuple(kind_of(q, q, q, causal=True, softcap=q.shape[1] > 3, dropout=q.shape[1] > 3)))

    torch.compile(function, backend="eager", fullgraph=True, dynamic=True)(torch.zeros(2, 5, 4, 16))
    assert kinds == [tuple(kind_of(*[torch.zeros(2, 5, 4, 16)] * 3, causal=True, softcap=True, dropout=True))]
