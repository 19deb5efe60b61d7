"""How Lightning logs."""
