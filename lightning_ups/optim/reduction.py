"""Reducing gradients of low precision over ranks in full precision, into their masters."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from lightning_ups.optim.master_weights import MasterWeights

__all__ = ["reduce_into_masters"]


def reduce_into_masters(wrapper: DistributedDataParallel, masters: MasterWeights) -> None:
    """Let ``wrapper`` average gradients in the type of the masters, with what they have accumulated already.

    The wrapper's own buckets have the type of the parameters: their sum over many ranks would be rounded to it.

    Raises:
        ValueError: If the wrapper has a communication hook already.
    """
    group = wrapper.process_group
    assert group is not None
    with torch.no_grad():
        for parameter, master in masters.of.items():
            # The wrapper has given every rank the first one's parameters, but knows nothing of their masters.
            dist.broadcast(master, src=dist.get_global_rank(group, 0), group=group)
            parameter.copy_(master)
    masters.take_over(by_value=True)
    try:
        wrapper.register_comm_hook(masters, _reduced)
    except RuntimeError as error:
        if "only be called once" not in str(error):
            raise
        raise ValueError(
            "Gradients are reduced by a hook of the user's already, and masters need theirs to sum in float32."
            " Leave ddp_comm_hook out of the strategy, or set weights='autocast' in the precision."
        ) from error


def _reduced(masters: MasterWeights, bucket: dist.GradBucket) -> Future[Tensor]:
    parameters = [parameter for parameter in bucket.parameters() if isinstance(parameter, nn.Parameter)]
    buffer = bucket.buffer()
    if not any(parameter in masters.of for parameter in parameters):
        return _averaged(buffer)  # complex numbers among others, whose bucket is of their parts
    total = buffer.to(torch.float32)
    parts = total.split([parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        if masters.accumulates and parameter in masters.of and (earlier := masters.of[parameter].grad) is not None:
            part.add_(earlier.flatten())  # of the microbatches before this one

    def finish(_: Any) -> Tensor:
        for parameter, part in zip(parameters, parts, strict=True):
            if parameter in masters.of:
                masters.of[parameter].grad = part.view_as(parameter)
                masters.reduced.add(parameter)
        return buffer.copy_(total)

    return _averaged(total).then(finish)


def _averaged(total: Tensor) -> Future[Tensor]:
    work = dist.all_reduce(total.div_(dist.get_world_size()), async_op=True)
    assert work is not None
    return work.get_future().then(lambda _: total)
