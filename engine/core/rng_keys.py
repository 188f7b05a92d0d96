"""Keys of random streams: integers computed from (seed, position, stream). Free of torch, for front end and scheduler.

Streams separate draws that must be independent: drafting and verifying a token with the same noise would bias the output.
Only the coupled rule shares TOKEN noise between drafter and verifier, by design.
"""

from enum import IntEnum

import msgspec

_MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB


class Stream(IntEnum):
    """Independent uses of randomness at one position."""

    TOKEN = 0  # the Gumbel noise that decides the token at a position under the coupled rule
    DRAFT = 1  # which tokens a tree gets
    ACCEPT = 2  # a verifier's acceptance of nodes
    EXTRA = 3  # the verifier's extra token
    SAMPLE = 4  # seeds of the samples of one request (`n`)


class StepKey(msgspec.Struct, frozen=True):
    """Identifies one tree's randomness: the request's seed and the absolute position of the tree's root token.

    A root position occurs once in a sequence, so (seed, root_position) never repeats for streams that must be fresh each step.
    """

    seed: int
    root_position: int


def _mix(value: int) -> int:
    """Return splitmix64's finaliser of a 64-bit integer."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * MIX_2) & _MASK
    return value ^ (value >> 31)


def stream_key(seed: int, position: int, stream: Stream) -> int:
    """Return the 64-bit key of a stream of draws."""
    return _mix(_mix(_mix(seed + GOLDEN) + position * GOLDEN) + (stream + 1) * GOLDEN)


def derived_seed(seed: int, index: int) -> int:
    """Return the seed of sample `index` of a request; sample 0 keeps the request's own seed."""
    return seed if index == 0 else stream_key(seed, index, Stream.SAMPLE)


def uniform(key: int, index: int) -> float:
    """Return draw `index` of a stream, in the open interval (0, 1): the same number as in `engine.sampling.noise.uniforms`."""
    return ((_mix(key + (index + 1) * GOLDEN) >> 12) + 0.5) * 2.0**-52
