"""A decoder's pass on a GPU in at most six launches a layer: Triton kernels, their torch reference, and the decoder."""
