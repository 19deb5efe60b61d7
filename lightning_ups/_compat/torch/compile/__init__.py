"""Private names of Dynamo and inductor."""
