"""Tensors of cached keys and values by slot, and the checks that watch who owns a slot."""
