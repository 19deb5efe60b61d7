"""Private names of FSDP2 and of DTensor."""
