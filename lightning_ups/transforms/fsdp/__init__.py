"""Sharding by `fully_shard`, and the checks around it."""
