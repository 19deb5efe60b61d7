import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode

from lightning_ups.transforms.error_hints import (
    advice_on_mixed_types,
    explaining_reads,
    explaining_types,
    float32_for,
    keeping_interrupt,
    note_second_backward,
    note_shards,
)


def test_two_types_are_explained_under_a_precision():
    said = r"training_step computes with tensors of two dtypes.*BF16Precision.*cast the tensor"
    with pytest.raises(RuntimeError, match=said), explaining_reads("training_step", param_dtype=torch.bfloat16):
        linear(torch.ones(1, 2), torch.ones(2, 2, dtype=torch.bfloat16))


def test_what_failed_in_a_graph_is_explained_without_the_advice_of_the_compiler():
    said = (
        r"computes with tensors of two dtypes: Compile failed on net: two dtypes, not the same dtype\. This precision"
    )
    with (
        pytest.raises(RuntimeError, match=said) as error,
        explaining_types("training_step", param_dtype=torch.bfloat16),
    ):
        raise RuntimeError(
            "Compile failed on net: two dtypes, not the same dtype. Something in it is beyond torch.compile."
        )
    assert "Something in it" not in str(error.value)
    with pytest.raises(RuntimeError, match="not the same dtype") as error, explaining_types("a", param_dtype=None):
        raise RuntimeError("two dtypes, not the same dtype")
    assert str(error.value) == "two dtypes, not the same dtype"


class Shape(nn.Module):
    def forward(self, x):
        return torch.fft.rfft(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(Shape()) for _ in range(2)])

    def forward(self, x):
        return self.blocks[1](x)


def test_an_operator_without_such_a_kernel_is_told_with_its_module():
    said = (
        r"does not support torch.bfloat16: Unsupported dtype BFloat16"
        r".*let blocks\.1\.0 \(Shape\).*in_float32=\['blocks\.\*\.\*'\]"
    )
    step = explaining_reads("training_step", param_dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=said) as error, step:
        Net()(torch.ones(2, 8, dtype=torch.bfloat16))
    assert "Unsupported dtype" in str(error.value.__cause__)


def test_a_module_of_torch_is_named_where_no_other_runs():
    net = nn.Sequential(nn.ModuleDict({"head": nn.Linear(2, 2)})["head"])
    with pytest.raises(RuntimeError) as error:
        net(torch.ones(1, 2, dtype=torch.bfloat16))
    # Of whichever precision: one in float8 is not to be left for that.
    cure = "let 0 (Linear) compute in float32, with in_float32=['*'] of a precision such as BF16Precision"
    assert float32_for(error.value) == cure
    assert float32_for(RuntimeError()).startswith("let that part compute in float32, with in_float32=[...] of a")


def test_two_types_are_told_as_that():
    with pytest.raises(RuntimeError) as error, advice_on_mixed_types("Cast them", in_float32=True):
        linear(torch.ones(1, 2), torch.ones(2, 2, dtype=torch.bfloat16))
    (note,) = error.value.__notes__
    assert "used a tensor of another dtype. Code that uses" in note
    assert "an operator" not in note


@pytest.mark.parametrize("in_float32", [False, True])
def test_under_master_weights_a_note_says_where_it_comes_from_and_the_cure(in_float32):
    with pytest.raises(RuntimeError) as error, advice_on_mixed_types("Cast them", in_float32=in_float32):
        Net()(torch.ones(2, 8, dtype=torch.bfloat16))
    (note,) = error.value.__notes__
    assert "called an operator that does not support it" in note
    assert note.endswith(" Cast them, or " + float32_for(error.value) + "." if in_float32 else " Cast them.")
    with pytest.raises(RuntimeError) as error, advice_on_mixed_types("Cast them", in_float32=in_float32):
        raise RuntimeError("stop here")
    assert not hasattr(error.value, "__notes__")


def test_without_one_they_are_the_users_own():
    with pytest.raises(RuntimeError, match="dtype") as error, explaining_reads("training_step", param_dtype=None):
        linear(torch.ones(1, 2), torch.ones(2, 2, dtype=torch.bfloat16))
    assert "training_step" not in str(error.value)


def test_a_late_read_is_told_how_to_be_named():
    with pytest.raises(RuntimeError, match=r"outside=\['encoder"), explaining_reads("test_step", param_dtype=None):
        raise RuntimeError("aten.mm.default got mixed torch.Tensor and DTensor, need to convert")


@pytest.mark.parametrize("error", [RuntimeError("stop here"), RuntimeError(""), ValueError("same dtype")])
def test_other_errors_stay_as_they_are(error):
    with pytest.raises(type(error)) as seen, explaining_reads("training_step", param_dtype=torch.bfloat16):
        raise error
    assert seen.value is error


def test_an_error_about_shards_has_one_note():
    error = RuntimeError("aten.copy_.default got mixed torch.Tensor and DTensor")
    for _ in range(2):
        note_shards(error, strategy="FSDP2Strategy")
    assert len(error.__notes__) == 1
    explained = RuntimeError("reads a DTensor. Use DDP.")
    explained.__cause__ = error
    for other in (explained, KeyError("DTensor"), RuntimeError("no memory")):
        note_shards(other, strategy="FSDP2Strategy")
        assert not hasattr(other, "__notes__")


@pytest.mark.parametrize(("compiled", "notes"), [(False, 0), (True, 1)])
def test_a_graph_that_was_freed_is_told_where_compiled_code_met_it(compiled, notes):
    layer = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    compute = torch.compile(layer, backend="aot_eager") if compiled else layer
    y = compute(torch.ones(1, 2, requires_grad=True)).sum()
    y.backward()
    with pytest.raises(RuntimeError, match="a second time") as error:
        y.backward()
    note_second_backward(error.value, kind="compiled", cure="Leave it out.")
    assert len(getattr(error.value, "__notes__", [])) == notes


@keeping_interrupt()
def interrupted_between_two_lines():
    with TorchDispatchMode():
        _pop_mode()  # as when the interrupt came before the mode was noted, and the end of the block comes all the same
        raise KeyboardInterrupt("Ctrl-C")


@keeping_interrupt()
def fails():
    torch.ones(2) @ torch.ones(3)


@keeping_interrupt()
def makes_an_error_of_it():
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        raise RuntimeError("mine")  # noqa: B904


def test_what_torch_raises_while_it_cleans_up_is_still_an_interrupt():
    with pytest.raises(KeyboardInterrupt, match="Ctrl-C") as caught:
        interrupted_between_two_lines()
    assert "mode stack" in str(caught.value.__cause__)


@pytest.mark.parametrize("function", [fails, makes_an_error_of_it])
def test_any_other_error_is_left_as_it_is(function):
    with pytest.raises(RuntimeError) as caught:
        function()
    assert caught.value.__cause__ is None
