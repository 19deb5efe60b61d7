"""What both ways of sharding share."""
