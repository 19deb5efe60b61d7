import torch.distributed as dist

from lightning_ups._compat.torch.fsdp.store import shared_store


def exchanged(prefix):
    store = shared_store(prefix)
    store.set(str(dist.get_rank()), f"from {dist.get_rank()}")
    return [store.get(str(rank)).decode() for rank in range(dist.get_world_size())]


def test_what_one_process_writes_the_others_read(ranks):
    assert ranks(exchanged, "a test") == ["from 0", "from 1"]
