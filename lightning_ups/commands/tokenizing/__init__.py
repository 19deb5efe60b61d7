"""Documents in files: what the processes of ``tokenize`` read. Imports neither torch nor Lightning."""
