"""The shapes of recorded passes. A pass is padded to the next of them."""

from itertools import chain, count, takewhile

from engine.attention.paged.table import Shape

_SMALL = (1, 2, 4, 8)
_FEW = 8  # tokens for each output token, in the shapes with few outputs


def _sizes() -> chain[int]:
    """Return 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, .. without an end. From 16 on, padding adds at most half."""
    return chain(_SMALL, (size << power for power in count() for size in (16, 24)))


class PaddingShapes:
    """Shapes of passes up to a number of tokens. Each size has two: with outputs of all tokens, or of few."""

    def __init__(self, most_tokens: int, is_by_row: bool = False) -> None:
        self._is_by_row = is_by_row
        self._sizes = [*takewhile(lambda size: size < most_tokens, _sizes()), most_tokens]

    @property
    def most_tokens(self) -> int:
        """Number of tokens of the largest shape."""
        return self._sizes[-1]

    @property
    def all(self) -> list[Shape]:
        """All shapes, the largest first, so that later recordings fit into the memory of earlier ones."""
        pairs = {(size, num_outputs) for size in self._sizes for num_outputs in (size, _few_of(size))}
        return [Shape(*pair, self._is_by_row) for pair in sorted(pairs, reverse=True)]

    def shape_of(self, num_tokens: int, num_outputs: int) -> Shape | None:
        """Return the smallest shape that fits a pass; None if none does."""
        size = next((size for size in self._sizes if size >= num_tokens), None)
        if size is None or num_outputs > size:
            return None
        return Shape(size, size if num_outputs > _few_of(size) else _few_of(size), self._is_by_row)


def _few_of(size: int) -> int:
    return max(1, size // _FEW)
