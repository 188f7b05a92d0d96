"""The way back through splitmix64: which key gives chosen bits, so that tests can reach the ends of the range."""

from engine.core.rng_keys import GOLDEN, MIX_1, MIX_2

_MASK = (1 << 64) - 1


def key_of_first_bits(bits: int) -> int:
    """Return the key whose first draw is made of these 64 bits."""
    value = _unshifted(bits, 31) * pow(MIX_2, -1, 1 << 64) & _MASK
    value = _unshifted(value, 27) * pow(MIX_1, -1, 1 << 64) & _MASK
    return (_unshifted(value, 30) - GOLDEN) & _MASK


def _unshifted(number: int, count: int) -> int:
    """Invert x ^ (x >> count)."""
    result = number
    for _ in range(64 // count + 1):
        result = number ^ (result >> count)
    return result
