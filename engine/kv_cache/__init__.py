"""Tensors of cached keys and values by slot, and the checks of slot ownership."""
