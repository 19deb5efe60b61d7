"""The store through which processes met: what one writes there, the others read, without a collective."""

import torch.distributed as dist

__all__ = ["shared_store"]


def shared_store(prefix: str) -> dist.Store:
    """Return the store of the world, for keys that begin with ``prefix``."""
    return dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())
