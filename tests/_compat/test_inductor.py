from threading import Thread

import pytest
from torch._inductor import config  # noqa: TID251

from lightning_ups._compat.inductor import (
    combined_kernels,
    eager_precision_casts,
    eager_random_numbers,
    tuned_blocks,
)


def seen_by_another_thread(name):
    seen = []
    thread = Thread(target=lambda: seen.append(getattr(config, name)))
    thread.start()
    thread.join()
    return seen[0]


@pytest.mark.parametrize(
    ("context", "name"),
    [
        (combined_kernels, "combo_kernels"),
        (eager_precision_casts, "emulate_precision_casts"),
        (eager_random_numbers, "fallback_random"),
        (tuned_blocks, "coordinate_descent_tuning"),
    ],
)
def test_it_holds_in_every_thread_and_ends(context, name):
    assert not getattr(config, name)
    with context():
        assert getattr(config, name)
        assert seen_by_another_thread(name)
    assert not getattr(config, name)
    assert not seen_by_another_thread(name)
    with pytest.raises(KeyError), context():
        raise KeyError
    assert not getattr(config, name)
