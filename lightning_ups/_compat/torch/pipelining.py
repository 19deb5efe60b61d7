"""Stages of torch's pipelines."""

from typing import Any

from torch.distributed.pipelining import PipelineStage as TorchStage
from typing_extensions import override


class PipelineStage(TorchStage):
    """Torch's stage, which never sends to its own rank: torch 2.11 does at first, and gloo cannot."""

    @override
    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]
