"""The run-time checker of annotated shapes: jaxtyping's import hook has beartype check every function of the engine.

jaxtyping's own wrapper binds the arguments of each call and has them checked twice, which took two thirds of the tests' time.
Here they are checked once, and only a signature that names shapes gets the memory in which axes are compared. In each test the
first calls of a function are checked (`check_anew`): checking all of them took a quarter of the engine tests' processor time.
"""

import dataclasses
import inspect
import random
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar, cast, get_args

import jaxtyping
from beartype import BeartypeConf, beartype
from beartype._check.code import codemain
from beartype.roar import BeartypeDecorHintPep3119Exception

F = TypeVar("F", bound=Callable[..., object])
_CHECK = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int is accepted as a float, as by mypy
_scope = jaxtyping.jaxtyped
CHECKED_CALLS = 16  # of each function in each test
_unchecked: list[int] = []  # number of calls that are still to be checked, of each function
# Which item of a container is checked is drawn at random. Drawn from the state that all threads share, it fails a property whose
# strategy another thread draws meanwhile: hypothesis forbids strategies to touch that state.
vars(codemain)["getrandbits"] = random.Random(0).getrandbits


def check_anew() -> None:
    """Have the next calls of each function checked."""
    _unchecked[:] = [CHECKED_CALLS] * len(_unchecked)


def install_shape_checks(modules: Sequence[str]) -> None:
    """Have the functions and dataclasses of these modules checked, from their next import on."""
    vars(jaxtyping)["jaxtyped"] = _decorator  # the name that the hook writes above each of them
    jaxtyping.install_import_hook(modules, "tests.typechecking.checked")


def checked(function: F) -> F:
    """Return the function with its annotations checked at its first calls, axes of one name being of one length.

    A Protocol in a signature cannot be checked at run time; such seams hold no tensors and are left to mypy. So are functions
    inside functions that name no shapes: their checks would be compiled anew by every call of the outer one.
    """
    names_shapes = any(map(_is_shaped, inspect.get_annotations(function).values()))
    if "<locals>" in function.__qualname__ and not names_shapes:
        return function
    try:
        check = _CHECK(function)
    except BeartypeDecorHintPep3119Exception:
        return function
    return _at_first(_with_own_axes(check) if names_shapes else check, function)


def _at_first(check: F, function: F) -> F:
    place = len(_unchecked)
    _unchecked.append(CHECKED_CALLS)

    @wraps(function)
    def either(*args: Any, **kwargs: Any) -> object:
        if not _unchecked[place]:
            return function(*args, **kwargs)
        _unchecked[place] -= 1
        return check(*args, **kwargs)

    return cast("F", either)


def _with_own_axes(check: F) -> F:
    @wraps(check)
    def scoped(*args: Any, **kwargs: Any) -> object:
        with _scope("context"):
            return check(*args, **kwargs)

    return cast("F", scoped)


def _decorator(*, typechecker: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Stand in for `jaxtyping.jaxtyped`."""

    def decorated(thing: Any) -> Any:
        if not inspect.isclass(thing):
            return typechecker(thing)
        if dataclasses.is_dataclass(thing) and "__init__" in vars(thing):
            made: Any = thing
            made.__init__ = typechecker(made.__init__)
        return thing

    return decorated


def _is_shaped(hint: Any) -> bool:
    return (inspect.isclass(hint) and issubclass(hint, jaxtyping.AbstractArray)) or any(map(_is_shaped, get_args(hint)))
