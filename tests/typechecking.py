"""The run-time checker of annotated shapes: beartype, asked by jaxtyping's import hook about every function of the engine."""

from collections.abc import Callable
from typing import TypeVar

from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeDecorHintPep3119Exception

F = TypeVar("F", bound=Callable[..., object])
_CHECK = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int may stand for a float, as for mypy


def checked(function: F) -> F:
    """Return the function with its annotations checked at each call.

    A Protocol in a signature cannot be asked about at run time; such seams hold no tensors and are left to mypy.
    """
    try:
        return _CHECK(function)
    except BeartypeDecorHintPep3119Exception:
        return function
