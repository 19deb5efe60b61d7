"""Optimizers that stay optimizers: schedulers, clipping, parameter groups and resume work as with torch's own."""

from lightning_ups.optim.delegating import check_options, go_by_the_name_of, refuse_state_of_others
from lightning_ups.optim.low_bit import check_rounding, make_portable
from lightning_ups.optim.master_gradients import reduce_into_masters
from lightning_ups.optim.master_weights import MasterWeights
from lightning_ups.optim.mastered import MasteredOptimizer
from lightning_ups.optim.offload import OffloadedOptimizer, TorchAOOffloaded, Update

__all__ = [
    "MasterWeights",
    "MasteredOptimizer",
    "OffloadedOptimizer",
    "TorchAOOffloaded",
    "Update",
    "check_options",
    "check_rounding",
    "go_by_the_name_of",
    "make_portable",
    "reduce_into_masters",
    "refuse_state_of_others",
]
