"""Which shapes of passes are recorded: a pass is padded to the next of them. Knows numbers alone."""

from itertools import chain, count, takewhile

from engine.attention.paged.table import Shape

_SMALL = (1, 2, 4, 8)
_FEW = 8  # a place is asked about for every so many tokens, where not all are


def _sizes() -> chain[int]:
    """Return 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, .. without an end: a pass is padded by half at most, and mostly by less."""
    return chain(_SMALL, (size << power for power in count() for size in (16, 24)))


class Ladder:
    """Shapes of passes up to a number of tokens. Of each size there are two: all tokens are asked about, or few."""

    def __init__(self, most_tokens: int) -> None:
        self._sizes = [*takewhile(lambda size: size < most_tokens, _sizes()), most_tokens]

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest."""
        return self._sizes[-1]

    @property
    def shapes(self) -> list[Shape]:
        """All of them, the largest first: what is recorded later fits into the memory of what came before."""
        return sorted({Shape(size, asked) for size in self._sizes for asked in (size, _few_of(size))}, reverse=True)

    def shape_of(self, num_tokens: int, num_asked: int) -> Shape | None:
        """Return the least shape that holds a pass; None if none does."""
        size = next((size for size in self._sizes if size >= num_tokens), None)
        if size is None or num_asked > size:
            return None
        return Shape(size, size if num_asked > _few_of(size) else _few_of(size))


def _few_of(size: int) -> int:
    return max(1, size // _FEW)
