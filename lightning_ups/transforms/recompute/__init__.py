"""Recomputing activations in the backward."""
