import pytest
import torch
from torch.nn.functional import cross_entropy

from lightning_ups._compat.torch.tensors.ops import (
    alike,
    costly_ops,
    is_composite,
    operators,
    register_costly_op,
    replaced_cross_entropy,
    uncalled,
)


def test_costly_ops_are_the_products_and_attention_of_this_torch():
    names = {op.name() for op in costly_ops()}
    assert {"aten::mm", "aten::addmm", "aten::bmm", "aten::convolution"} <= names
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in names
    assert not any(is_composite(op) for op in costly_ops())
    assert not any("out" in name.rpartition(".")[2] for name in names)


@pytest.mark.parametrize("name", ["aten.mm", "aten::mm", "aten.mm.default"])
def test_an_operator_is_found_by_its_name(name):
    assert torch.ops.aten.mm.default in operators([name])


@pytest.mark.parametrize(
    ("name", "near"),
    [("aten.mmm", "aten.mm"), ("aten.scaled_dot_product_flash", "_scaled_dot_product_flash_attention")],
)
def test_an_unknown_operator_names_near_ones_that_run(name, near):
    with pytest.raises(ValueError, match=rf"no operator '{name}'.*nearest first: .*{near}") as error:
        operators([name])
    listed = str(error.value).split("nearest first: ")[1].rstrip(".").split(", ")
    assert not any(all(map(is_composite, operators([usable]))) for usable in listed)


def test_a_name_is_called_if_one_of_its_overloads_is():
    called = {torch.ops.aten.add.Tensor, torch.ops.higher_order.flex_attention}
    names = ["aten.add", "aten.add.Tensor", "aten.add.Scalar", "aten.mm", "higher_order.flex_attention"]
    assert uncalled(names, called) == ["aten.add.Scalar", "aten.mm"]


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["aten.mm"], ["aten.addmm", "aten._scaled_dot_product_flash_attention_for_cpu"]),  # and not aten.mul
        (["aten._scaled_dot_product_flash_attention", "aten.mm"], ["aten._scaled_dot_product_flash_attention_for_cpu"]),
        (["aten.gelu_backward"], ["aten.gelu"]),
        (["aten.sort"], ["aten.addmm", "aten._scaled_dot_product_flash_attention_for_cpu"]),
    ],
)
def test_what_is_alike_is_as_costly_or_has_nearly_the_name(names, found):
    aten = torch.ops.aten
    called = {aten.mul.Tensor, aten.gelu.default, aten.addmm.default, aten.addmm.dtype}
    called.add(aten._scaled_dot_product_flash_attention_for_cpu.default)
    assert alike(names, called)[: len(found)] == found


def test_an_operator_may_be_registered_before_it_is_defined():
    register_costly_op("ops_tests.late")
    assert not any("ops_tests" in op.name() for op in costly_ops())
    late = torch.library.custom_op(
        "ops_tests::late", lambda x: x.clone(), mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    assert torch.ops.ops_tests.late.default in costly_ops()
    assert late is not None


def test_a_name_without_a_namespace_says_what_to_do():
    with pytest.raises(ValueError, match=r"register_costly_op\('mm'\) has no namespace.*Say 'namespace\.mm'"):
        register_costly_op("mm")


def test_the_replacement_is_called_and_compiled_code_has_the_operator():
    logits, target, seen = torch.randn(4, 8), torch.arange(4), []

    def seeing(operator):
        def see(*args):
            seen.append(type(args[0]))
            return operator(*args)

        return see

    expected = cross_entropy(logits, target)
    with replaced_cross_entropy(seeing):
        assert torch.equal(cross_entropy(logits, target), expected)
        assert seen == [torch.Tensor]
        torch.compiler.reset()
        compiled = torch.compile(cross_entropy, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(logits, target), expected)
        seen.clear()
        torch.testing.assert_close(compiled(logits, target), expected)
        assert seen == []
    assert torch.equal(cross_entropy(logits, target), expected)
    assert seen == []
