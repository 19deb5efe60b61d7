import copy
import pickle

import pytest
import torch
from torch import nn

from lightning_ups.transforms.te.forward import Calls, Joint, PassedOn, computed_by
from lightning_ups.transforms.te.modules import linear_for, norm_linear_for
from tests import fake_te


@pytest.fixture(autouse=True)
def engine():
    with fake_te.installed() as module:
        yield module


def zero(_, value):
    return torch.zeros_like(value)


class Named(nn.Linear):
    """At the top of a module, so that it can be pickled."""


class TestComputedBy:
    def test_the_forward_is_replaced_and_put_back(self):
        linear, value = Named(4, 4), torch.randn(2, 4)
        expected = linear(value)
        with computed_by(linear, zero):
            assert not linear(value).any()
            assert isinstance(linear, Named)
            assert type(linear).__name__ == "Named"
            assert not linear(input=value).any()
        assert type(linear) is Named
        assert torch.equal(linear(value), expected)

    def test_equal_modules_share_a_class(self):
        a, b = Named(4, 4), Named(4, 4)
        with computed_by(a, zero), computed_by(b, zero):
            assert type(a) is type(b)
            assert "forward" not in vars(a)

    def test_hooks_stay_outside(self):
        linear, seen = Named(4, 4), []
        linear.register_forward_hook(lambda module, args, out: seen.append(out))
        with computed_by(linear, zero):
            linear(torch.randn(2, 4))
        assert not seen[0].any()

    @pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda linear: pickle.loads(pickle.dumps(linear))])
    def test_a_copy_has_its_own_forward(self, copied):
        linear, value = Named(4, 4), torch.randn(2, 4)
        with computed_by(linear, zero):
            twin = copied(linear)
            assert twin(value).any()
        assert type(twin) is Named
        assert torch.equal(twin(value), linear(value))

    def test_a_class_that_another_put_over_it_stays(self):
        linear, value = Named(4, 4), torch.randn(2, 4)
        expected = linear(value)
        with computed_by(linear, zero):
            over = type("FSDPNamed", (type(linear),), {})
            linear.__class__ = over
        assert type(linear) is over
        assert torch.equal(linear(value), expected)

    def test_an_error_puts_it_back(self):
        linear = Named(4, 4)
        with pytest.raises(RuntimeError, match="stop"), computed_by(linear, zero):
            raise RuntimeError("stop")
        assert type(linear) is Named


class TestPassedOn:
    def test_its_value_is_known_again(self):
        passed, value = PassedOn("norm"), torch.randn(2, 4)
        out = passed(nn.Module(), value)
        assert torch.equal(out, value)
        passed.check("linear", out)

    def test_another_value_is_refused(self):
        passed, value = PassedOn("norm"), torch.randn(2, 4)
        out = passed(nn.Module(), value)
        with pytest.raises(RuntimeError, match=r"together with norm, and got something else.*fuse='none'"):
            passed.check("linear", value)
        passed.check("linear", value)  # once: what ran before is not known for ever
        assert out is not value


def joint(calls=None):
    norm, a, b = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 32)
    linears, passed = {"a": a, "b": b}, PassedOn("norm")
    borrower = norm_linear_for(("norm", norm), linears, sharded=False)
    return norm, linears, passed, Joint(borrower, passed, linears, calls or Calls(once=False))


class TestJoint:
    @pytest.mark.parametrize("order", [1, -1])
    def test_one_product_whoever_comes_first(self, order):
        calls = Calls(once=False)
        norm, linears, passed, both = joint(calls)
        value = passed(norm, torch.randn(8, 16))
        for linear in [*linears.values()][::order]:
            torch.testing.assert_close(both(linear, value), linear(norm(value)))
        assert calls.total == 1

    def test_another_value_is_refused(self):
        norm, linears, passed, both = joint()
        value = passed(norm, torch.randn(8, 16))
        both(linears["a"], value)
        with pytest.raises(RuntimeError, match=r"b got another value.*fuse='none'"):
            both(linears["b"], value.clone())

    def test_the_next_round_begins_anew(self):
        norm, linears, passed, both = joint()
        for _ in range(2):
            value = passed(norm, torch.randn(8, 16))
            for linear in linears.values():
                torch.testing.assert_close(both(linear, value), linear(norm(value)))

    def test_one_that_is_not_asked_for_its_part_is_not_in_the_way(self):
        norm, linears, passed, both = joint()
        both(linears["a"], passed(norm, torch.randn(8, 16)))
        value = passed(norm, torch.randn(8, 16))
        torch.testing.assert_close(both(linears["a"], value), linears["a"](norm(value)))


class TestCalls:
    def borrower(self):
        return linear_for(nn.Linear(16, 16), name="a", sharded=False)

    def test_rows_are_checked_in_float8_alone(self, engine):
        calls, borrower = Calls(once=False), self.borrower()
        calls.note("a", borrower, torch.randn(3, 16))
        with engine.autocast(recipe=fake_te.Float8CurrentScaling()):
            calls.note("a", borrower, torch.randn(2, 4, 16))
            with pytest.raises(ValueError, match=r"a got \(3, 16\): 3 rows.*drop_last=True"):
                calls.note("a", borrower, torch.randn(3, 16))
        assert calls.total == 3

    def test_a_second_run_is_refused_where_it_would_lose_a_maximum(self, engine):
        calls, borrower = Calls(once=True), self.borrower()
        with engine.autocast(recipe=fake_te.DelayedScaling()):
            calls.note("a", borrower, torch.randn(8, 16))
            with pytest.raises(RuntimeError, match=r"a ran twice.*recipe='current'"):
                calls.note("a", borrower, torch.randn(8, 16))
            calls.begin()
            calls.note("a", borrower, torch.randn(8, 16))
        calls.note("a", borrower, torch.randn(8, 16))
