"""Attention on a GPU with fixed shapes: the table of slots, the kernels, and CUDA graphs."""
