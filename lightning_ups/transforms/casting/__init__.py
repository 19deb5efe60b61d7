"""Casting parameters, inputs and products."""
