"""Optimizers that stay optimizers: schedulers, clipping, parameter groups and resume work as with torch's own."""

from lightning_ups.optim.master_weights import MasteredOptimizer, MasterWeights

__all__ = ["MasterWeights", "MasteredOptimizer"]
