"""Sharding by parametrization, for one compiled graph."""
