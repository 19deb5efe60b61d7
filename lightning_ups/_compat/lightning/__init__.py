"""Private names of Lightning."""
