"""Keyed randomness: golden values, uniformity, and independence of everything that must be independent."""

import pytest

from engine.core import rng_keys as keys
from engine.core.rng_keys import GOLDEN, Stream, derived_seed, stream_key, uniform
from tests.chi_square import FAILS_ABOVE, PASSES_BELOW, z_of_pairs, z_of_uniforms
from tests.splitmix import key_of_first_bits

NUM_DRAWS = 6000


def test_golden_values():
    """A changed value would change every seeded text that was ever promised."""
    assert stream_key(0, 0, Stream.TOKEN) == 6235967106033911276
    assert stream_key(2**63 - 1, 8191, Stream.EXTRA) == 18292006158175432473
    assert uniform(stream_key(42, 7, Stream.DRAFT), 3) == 0.9662711989586402


def test_draws_are_splitmix64():
    """The first outputs of the published generator from seed 0."""
    published = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)
    assert [uniform(0, index) for index in range(3)] == [((bits >> 12) + 0.5) / 2**52 for bits in published]


def test_the_interval_is_open_at_both_ends():
    """The largest draw once rounded to 1.0, where Gumbel noise is infinite."""
    assert uniform(key_of_first_bits((1 << 64) - 1), 0) == 1.0 - 2.0**-53
    assert uniform(key_of_first_bits(0), 0) == 2.0**-53


def test_first_sample_keeps_seed_others_differ():
    seeds = [derived_seed(5, index) for index in range(50)]
    assert seeds[0] == 5
    assert len(set(seeds)) == 50


def test_keys_do_not_collide():
    named = {stream_key(s, p, stream) for s in range(40) for p in range(40) for stream in Stream}
    assert len(named) == 40 * 40 * len(Stream)


def draws_over(axis: str, key=stream_key) -> list[float]:
    """Return draws along one axis of (seed, position, stream, index), the others fixed."""
    draw = {
        "seed": lambda i: uniform(key(i, 3, Stream.TOKEN), 0),
        "position": lambda i: uniform(key(11, i, Stream.TOKEN), 0),
        "index": lambda i: uniform(key(11, 3, Stream.TOKEN), i),
    }[axis]
    return [draw(i) for i in range(NUM_DRAWS)]


@pytest.mark.parametrize("axis", ["seed", "position", "index"])
def test_draws_are_uniform_along(axis):
    assert z_of_uniforms(draws_over(axis)) < PASSES_BELOW


@pytest.mark.parametrize("axis", ["seed", "position", "index"])
@pytest.mark.parametrize("lag", [1, 2, 16])
def test_draws_are_independent_along(axis, lag):
    draws = draws_over(axis)
    assert z_of_pairs(draws[:-lag], draws[lag:]) < PASSES_BELOW


def neighbours(key) -> dict[str, float]:
    """Return z scores of pairs that must be independent: next position, another stream, next seed, both at once."""
    base = [uniform(key(seed, 20, Stream.DRAFT), 0) for seed in range(NUM_DRAWS)]
    other = {
        "position": [uniform(key(seed, 21, Stream.DRAFT), 0) for seed in range(NUM_DRAWS)],
        "stream": [uniform(key(seed, 20, Stream.ACCEPT), 0) for seed in range(NUM_DRAWS)],
        "diagonal": [uniform(key(seed - 1, 21, Stream.DRAFT), 0) for seed in range(NUM_DRAWS)],
        "index": [uniform(key(seed, 20, Stream.DRAFT), 1) for seed in range(NUM_DRAWS)],
        "position and index": [uniform(key(seed, 19, Stream.DRAFT), 1) for seed in range(NUM_DRAWS)],
    }
    return {name: z_of_pairs(base, values) for name, values in other.items()}


def test_neighbours_are_independent():
    assert max(neighbours(stream_key).values()) < PASSES_BELOW


@pytest.mark.parametrize(
    ("mutant", "pair"),
    [
        (lambda seed, position, stream: stream_key(seed, 0, stream), "position"),
        (lambda seed, position, stream: stream_key(seed, position, Stream.TOKEN), "stream"),
        (lambda seed, position, stream: stream_key(seed + position, 0, stream), "diagonal"),
        (lambda seed, position, stream: keys._mix(seed) + position * GOLDEN, "position and index"),
    ],
)
def test_independence_kills(mutant, pair):
    """Draws reused at the next position, by another stream, by the next seed, or by a shifted index."""
    assert neighbours(mutant)[pair] > FAILS_ABOVE
