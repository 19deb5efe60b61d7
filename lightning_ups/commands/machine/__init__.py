"""What a machine has: its packages, its speed, and known hazards."""
