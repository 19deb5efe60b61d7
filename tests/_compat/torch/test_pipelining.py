import torch
import torch.distributed as dist
from torch import nn

from lightning_ups._compat.torch.pipelining import PipelineStage


def peers():
    stage = PipelineStage(nn.Linear(2, 2), 1, 4, torch.device("cpu"))
    stage.stage_index_to_group_rank = {0: 1 - dist.get_rank(), 1: dist.get_rank(), 2: dist.get_rank(), 3: 0}
    return [op.group_peer for op in stage._get_init_p2p_neighbors_ops()]


def test_a_stage_never_sends_to_its_own_rank(ranks):
    assert {*ranks(peers)} == {1}
