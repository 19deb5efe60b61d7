"""The backends of attention."""
