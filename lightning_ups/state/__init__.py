"""What a run keeps: checkpoints, resuming, and guarding against bad steps."""
