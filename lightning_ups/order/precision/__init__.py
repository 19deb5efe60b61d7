"""The base class of precisions: a dtype policy, float32 master weights, and optimizer steps."""

from lightning_ups.order.precision.policy_precision import PolicyPrecision, Weights, under_sharding

__all__ = ["PolicyPrecision", "Weights", "under_sharding"]
