"""Float8 layers by torchao."""
