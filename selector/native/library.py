"""The compiled part of choosing: finds it, and declares what it takes. Structures mirror those of chooser.cpp.

Shape key: K prices or least chances, B sequences, M entries of a menu.
"""

import ctypes
from ctypes import POINTER, Structure, c_double, c_int64, c_void_p
from functools import cache
from importlib.util import find_spec

LAYOUT = 2  # of what these structures mean, and functions take, where no size tells it (kLayout)
NUM_OF_TREE = 7  # whole numbers
NUM_SUMS = 4  # of trees, by the least chance that admits a node
NUM_OTHER_PRICES = 9  # beside those of tokens: of a step, of four things more in the rest of it, and of four in drafting
MOST_KNOTS = 32  # between which tokens have prices
_MODULE = "selector.native.chooser"


class Work(Structure):
    """What a step runs, as engine.policy.StepWork has it; expectations need not be whole."""

    _fields_ = (
        *((name, c_double) for name in ("num_rows", "num_tokens", "num_drawn", "num_keys", "num_scores")),
        *((name, c_double) for name in ("num_passes", "num_draft_tokens", "num_rounds")),
    )


class Costs(Structure):
    """A cost model's arrays, [K] and [K, K], which learning changes, and its constants."""

    _fields_ = (
        *((name, c_void_p) for name in ("prior", "error", "covariance", "prior_covariance", "prices", "was_clipped", "knots")),
        ("num_knots", c_int64),
        *((name, c_double) for name in ("forgetting", "noise", "most_sigmas", "least_factor", "forgotten", "keys")),
    )


class Worth(Structure):
    """What is known of noise-aware trees: a menu's, each seat's and each kind's, and the constants of learning it."""

    _fields_ = (
        ("num_chances", c_int64),
        *((name, c_void_p) for name in ("least", "depth", "most_nodes", "start")),
        *((name, c_void_p) for name in ("sums", "trees", "came")),
        *((name, c_void_p) for name in ("kind_sums", "kind_trees", "kind_begun", "kind_came")),
        *((name, c_double) for name in ("start_trees", "kind_trees_weight", "edge", "kind_memory", "own_memory")),
        *((name, c_double) for name in ("came_tokens", "came_memory")),
    )


class Trees(Structure):
    """Trees that have grown, all of which are equally recent.

    NUM_OF_TREE numbers of each: its seat and kind, where its nodes begin and how many they are, the same of those that were
    accepted, and its rounds. How likely a node is, at least, that it tells of, itself and to its kind. Chances and depths of all
    nodes, and places, within their tree, of those that were accepted.
    """

    _fields_ = (
        ("trees", c_void_p),
        ("count", c_int64),
        *((name, c_void_p) for name in ("least", "chances", "depths", "accepted")),
    )


class Step(Structure):
    """What a choice is made from: estimates and what is allowed [B, M], sequences [B], a menu [M], and what runs anyway."""

    _fields_ = (
        *((name, c_void_p) for name in ("costs", "tokens", "nodes", "passes", "fed", "is_allowed")),
        *((name, c_void_p) for name in ("context", "unfed", "draws")),
        *((name, c_void_p) for name in ("depths", "most_nodes", "levels")),
        *((name, c_int64) for name in ("num_rows", "num_entries", "num_levels", "is_by_chance")),
        ("base", Work),
        *((name, c_double) for name in ("base_tokens", "model_share", "least_chance")),
    )


@cache
def library() -> ctypes.PyDLL | None:
    """Return the library, or None where it was not compiled; raise OSError if it was compiled from another version.

    Its calls take microseconds: no other thread is let in meanwhile.
    """
    spec = find_spec(_MODULE)
    if spec is None or spec.origin is None:
        return None
    loaded = ctypes.PyDLL(spec.origin)
    expected = [
        *map(ctypes.sizeof, (Work, Costs, Worth, Trees, Step)),
        NUM_OF_TREE,
        NUM_SUMS,
        NUM_OTHER_PRICES,
        MOST_KNOTS,
        LAYOUT,
    ]
    sizes = (c_int64 * len(expected))()
    loaded.selector_sizes(sizes)
    if list(sizes) != expected:
        raise OSError(f"{spec.origin} was compiled from another version: install the package again")
    loaded.selector_learn_prices.argtypes = [POINTER(Costs), POINTER(Work), c_double, c_double]
    loaded.selector_learn_prices.restype = None
    loaded.selector_learn_worth.argtypes = [POINTER(Worth), POINTER(Trees)]
    loaded.selector_learn_worth.restype = None
    loaded.selector_expect.argtypes = [POINTER(Worth), *(c_void_p, c_void_p, c_int64) * 2, c_void_p, c_int64]
    loaded.selector_expect.restype = None
    loaded.selector_is_finite.argtypes = [POINTER(Step)]
    loaded.selector_is_finite.restype = c_int64
    loaded.selector_price.argtypes = [POINTER(Step), c_void_p, c_int64, c_void_p, c_void_p]
    loaded.selector_price.restype = None
    loaded.selector_try.argtypes = [POINTER(Step), c_void_p, c_void_p, c_int64, c_void_p, c_void_p]
    loaded.selector_try.restype = None
    loaded.selector_best_alike.argtypes = [POINTER(Step), c_void_p, c_void_p]
    loaded.selector_best_alike.restype = None
    loaded.selector_growth_prices.argtypes = [POINTER(Step), c_void_p, c_double, c_int64, c_void_p, c_int64, c_void_p]
    loaded.selector_growth_prices.restype = c_int64
    loaded.selector_ceiling.argtypes = [POINTER(Step)]
    loaded.selector_ceiling.restype = c_double
    return loaded


def required() -> ctypes.PyDLL:
    """Return the library; raise OSError if it was not compiled."""
    if (found := library()) is None:
        raise OSError(f"{_MODULE} was not compiled")
    return found
