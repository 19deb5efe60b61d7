"""How Lightning loads and moves batches."""
