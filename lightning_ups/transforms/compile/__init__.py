"""Compiling modules, and choosing between eager code, compiled code and CUDA graphs."""
