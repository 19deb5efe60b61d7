"""The implementations of attention."""
