"""One training step on fake tensors, and what it tells of memory and time."""
