"""Gradients that are put together by a function of ours, in the midst of FSDP2."""

from unittest.mock import patch

import pytest
from torch.distributed.fsdp._fully_shard import _fsdp_collectives  # noqa: TID251

from lightning_ups._compat.torch.compile.graph_passes import copy_together
from lightning_ups.strategies import FSDP2Strategy
from tests.strategies import cases
from tests.strategies.cases import two_ranks


def both(name, tmp_path, options):
    """Train by torch's way and by ours; return what differs in any bit, and how often ours was asked."""
    asked, before = [], _fsdp_collectives.foreach_reduce_scatter_copy_in

    def ours(gradients, out, size):
        asked.append(size)
        if any(gradient.shape[0] % size for gradient in gradients):
            return False
        copy_together(gradients, out, size)
        return True

    results = []
    for put_together in (lambda *_: False, ours):
        with patch("lightning_ups.strategies.fsdp2.put_together", put_together):
            results.append(cases.train(name, tmp_path, strategy=FSDP2Strategy(**options), ranks=2, steps=3)[2])
    assert _fsdp_collectives.foreach_reduce_scatter_copy_in is before
    theirs, own = results
    differ = [key for key, weight in theirs["weights"].items() if not weight.equal(own["weights"][key])]
    return theirs["losses"] == own["losses"], differ, len(asked)


@pytest.mark.parametrize("options", [{}, {"sharding": "gradients"}], ids=str)
def test_it_is_asked_for_each_group_and_not_a_bit_changes(ranks, tmp_path, options):
    assert ranks(both, "Tied", tmp_path, options) == (True, [], 12)


@two_ranks
def test_after_an_exception_torch_has_its_own_again(tmp_path):
    def broken(*_):
        raise ArithmeticError("in backward")

    before = _fsdp_collectives.foreach_reduce_scatter_copy_in
    with (
        patch("lightning_ups.strategies.fsdp2.put_together", broken),
        pytest.raises(ArithmeticError, match="in backward"),
    ):
        cases.train("Tied", tmp_path, strategy=FSDP2Strategy(), ranks=2, steps=1)
    assert _fsdp_collectives.foreach_reduce_scatter_copy_in is before
