"""Reading and writing the files of a checkpoint."""
