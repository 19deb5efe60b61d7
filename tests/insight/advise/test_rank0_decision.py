import pytest
import torch.distributed as dist

from lightning_ups.insight.advise.rank0_decision import decide_on_rank0


def test_without_ranks_the_result_is_returned():
    assert decide_on_rank0(lambda: {"layer": "is slower"}, by="Advice") == {"layer": "is slower"}
    with pytest.raises(KeyError, match="broken"):
        decide_on_rank0(lambda: {}["broken"], by="Advice")


def decide(fail):
    """Return the result of each rank, or its error."""
    mine = dist.get_rank()

    def find():
        assert mine == 0, "only rank 0 measures"
        if fail:
            raise KeyError("broken")
        return {"found by": str(mine)}

    try:
        told = decide_on_rank0(find, by="Advice")
    except (KeyError, RuntimeError) as error:
        told = f"{type(error).__name__}: {error}"
    both = [None, None]
    dist.all_gather_object(both, told)
    return both


def test_all_ranks_do_as_rank_0_found(ranks):
    assert ranks(decide, False) == [{"found by": "0"}] * 2


def test_a_failure_on_rank_0_raises_on_all_ranks(ranks):
    first, other = ranks(decide, True)
    assert first == "KeyError: 'broken'"
    assert other.startswith("RuntimeError: Advice failed on rank 0")
