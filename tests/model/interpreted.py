"""Triton's interpreter, where it does otherwise than a GPU.

It multiplies the bits of bfloat16 numbers as integers, and its rows of a product depend on their place among the others.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_DOT = InterpreterBuilder.create_dot


def _widened(handle: Any) -> Any:
    """Return a bfloat16 operand as float32."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _dot(builder: Any, a: Any, b: Any, *others: Any) -> Any:
    return _DOT(builder, _widened(a), _widened(b), *others)


@contextmanager
def widened_products() -> Iterator[None]:
    """Have products of bfloat16 numbers interpreted as what they are; nothing on a GPU."""
    with patch.object(InterpreterBuilder, "create_dot", _dot):
        yield


def _dot_by_row(builder: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
    wide, other = (_widened(one).data.astype(np.float32) for one in (a, b))
    return TensorHandle(np.stack([row @ other for row in wide]) + d.data, d.dtype.scalar)


@contextmanager
def products_by_row() -> Iterator[None]:
    """Have each row of a product interpreted by itself, as a tensor core adds it."""
    with patch.object(InterpreterBuilder, "create_dot", _dot_by_row):
        yield
