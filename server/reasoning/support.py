"""Whether a model writes reasoning blocks, found from its chat template and its tokens."""

from dataclasses import dataclass
from typing import Literal

from server.reasoning.reader import Markers
from server.text.codec import TextCodec

ReasoningParser = Literal["auto", "think", "none"]

_MARKERS = Markers()


@dataclass(frozen=True, slots=True)
class ReasoningSupport:
    """The markers of the model's reasoning blocks, None if it writes no blocks, and whether each is a single token."""

    markers: Markers | None = None
    are_tokens: bool = False


def reasoning_support(codec: TextCodec, parser: ReasoningParser) -> ReasoningSupport:
    """Return the known facts of the model. `parser` names the form of its blocks, or is `auto` to detect it, or `none`.

    A model is detected by a template that writes or removes blocks, or by tokens of its own for both markers.
    """
    both = (_MARKERS.opening, _MARKERS.closing)
    are_tokens = codec.added_tokens.issuperset(both)
    template = str(codec.info.chat_template or "")
    is_found = are_tokens or any(marker in template for marker in both)
    if parser == "none" or (parser == "auto" and not is_found):
        return ReasoningSupport()
    return ReasoningSupport(_MARKERS, are_tokens)
