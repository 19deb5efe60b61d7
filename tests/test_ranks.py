"""The ranks that the tests use are processes of their own, and say so when something goes wrong in one of them."""

import os
import random

import numpy as np
import pytest
import torch.distributed as dist

from tests.ranks import Ranks


def everywhere(value):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def who():
    return everywhere((dist.get_rank(), os.getpid(), os.getppid(), hash("a name"), random.random(), np.random.rand()))


def fail_on(rank):
    if dist.get_rank() == rank:
        raise ValueError("on purpose")


def raise_nothing():
    with pytest.raises(ValueError, match="which nothing raises"):
        pass


def end():
    os._exit(3)


def test_nothing_that_is_drawn_is_the_same_by_chance(tmp_path):
    new = Ranks(2, tmp_path / "store")  # what has run on others may have set their seeds
    numbers, *drawn = zip(*new(who), strict=True)
    new.close()
    assert numbers == (0, 1)
    assert all(len({*values}) == 2 for values in drawn)


def test_an_error_names_its_rank_and_the_ranks_live_on(ranks):
    with pytest.raises(AssertionError, match=r"(?s)rank 1:.*ValueError: on purpose"):
        ranks(fail_on, 1)
    assert len(ranks(who)) == 2


def test_a_failure_of_pytest_is_an_error_too(ranks):
    with pytest.raises(AssertionError, match=r"(?s)rank 0:.*DID NOT RAISE.*ValueError"):
        ranks(raise_nothing)
    assert len(ranks(who)) == 2


def end_on(rank):
    if dist.get_rank() == rank:
        end()
    return everywhere(rank)


def test_a_rank_that_ends_is_no_hang_and_others_are_born(tmp_path):
    two = Ranks(2, tmp_path / "store")
    with pytest.raises(AssertionError, match=r"rank 1 has ended amid <function end_on"):
        two(end_on, 1)
    assert len(two(who)) == 2
    two.close()
