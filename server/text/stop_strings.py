"""Finds stop strings in text that arrives in pieces. Knows text only."""

from collections.abc import Sequence


class StopFinder:
    """Passes text up to the first stop string, optionally with it, and holds back an end that may become one.

    The first stop string is complete first; if several end together, it begins first. It depends on the text alone,
    not on how the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str], keeps_stop: bool = False) -> None:
        if any(not stop for stop in stops):
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(stops)
        self._keeps_stop = keeps_stop
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.hit: str | None = None  # the stop string that was found

    @property
    def is_hit(self) -> bool:
        """Whether a stop string was found."""
        return self.hit is not None

    def feed(self, text: str, num_barred: int = 0) -> str:
        """Add text; return the text that is certainly before any stop string, or ends in one that is kept. Later text is dropped.

        No stop string ends in the first `num_barred` characters of the text. A stop string that begins there may end later.
        """
        if not self._stops:
            return text
        if self.is_hit:
            return ""
        first, text = len(self._held) + num_barred, self._held + text
        starts = [(stop, text.find(stop, max(0, first - len(stop) + 1))) for stop in self._stops]
        found = [(at + len(stop), at) for stop, at in starts if at >= 0]
        if found:
            end, start = min(found)
            self.hit, self._held = text[start:end], ""
            return text[: end if self._keeps_stop else start]
        num_held = self._num_held(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def close(self) -> str:
        """Return the text that was held back: no more text follows, so it is no stop string."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        """Return the length of the longest end of `text` that begins a stop string."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
