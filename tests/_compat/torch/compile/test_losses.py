import torch
from torch.nn.functional import cross_entropy

from lightning_ups._compat.torch.compile.losses import replaced_cross_entropy


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
