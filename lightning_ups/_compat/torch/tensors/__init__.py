"""Private names of tensors, operators and autograd."""
