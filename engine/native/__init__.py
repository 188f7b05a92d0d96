"""Decoders in C++ for processors with AVX2 or AVX-512: one call a pass, each row the same bits whatever is computed beside it."""
