"""Saved state: checkpoints, resuming, and guarding against bad steps."""
