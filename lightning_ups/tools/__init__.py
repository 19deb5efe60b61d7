"""The commands beside fit: they parse and print."""
