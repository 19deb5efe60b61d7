import pytest
import torch

from lightning_ups.strategies.bucket_size import BucketSize, best_size, measure_bucket_size

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("latency", "total", "expected"),
    [
        (0.0, 40, 1),  # nothing is gained by fewer reductions
        (0.00003, 40, 10),  # NVLink: sqrt(latency * bandwidth * total) is 15 MiB
        (0.01, 40, 40),
    ],
)
def test_the_best_size_grows_with_the_latency(latency, total, expected):
    bandwidth = 200e3  # MiB/s
    assert best_size({size: latency + size / bandwidth for size in (1, 4, 10, 25, 40)}, total) == expected


def test_a_small_model_has_one_bucket_and_is_not_measured():
    assert measure_bucket_size(1000, CPU) == BucketSize(1.0, {})
    assert str(BucketSize(1.0, {})) == "buckets of 1 MiB: all gradients fit into one"


def measured():
    found = measure_bucket_size(5 * 2**20 + 1, CPU)
    everywhere = [None, None]
    torch.distributed.all_gather_object(everywhere, found)
    return everywhere


def test_all_ranks_choose_the_same_size(ranks):
    one, other = ranks(measured)
    assert one == other
    assert [*one.milliseconds] == [1, 4, 6]
    assert one.mb in one.milliseconds
