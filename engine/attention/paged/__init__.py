"""Attention on a GPU with shapes known in advance: the table of slots, the kernels, and recorded graphs."""
