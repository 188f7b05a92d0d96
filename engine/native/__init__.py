"""Decoders in C++ for processors with AVX2 or AVX-512: one call a pass. A row has the same bits in any batch."""
