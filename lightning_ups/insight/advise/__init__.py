"""Measuring which float8 recipe is fastest for the shapes of a model."""
