"""The reasoning of one request: where its answers begin, how they are split, and where a grammar begins."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum, auto

from engine.core.types import FreeBlock, Grammar
from server.http.errors import InvalidRequest
from server.reasoning.reader import Markers, ReasoningReader
from server.reasoning.support import ReasoningSupport
from server.schemas.chat import ChatRequest
from server.text.parsed_text import CallReader

NUM_END_IDS = 24  # last tokens of a prompt: enough for a marker that is spelled out, and space behind it


class Beginning(Enum):
    """Where an answer begins: inside a block that the prompt has opened, before a possible block, or where none can be."""

    INSIDE = auto()
    BEFORE = auto()
    BEHIND = auto()


@dataclass(frozen=True, slots=True)
class ReasoningUse:
    """How a request's answers are split. Without `markers` all text is the answer. A grammar leaves the text of `block` free."""

    markers: Markers | None = None
    begins_inside: bool = False
    keeps_reasoning: bool = True
    block: FreeBlock | None = None

    @property
    def kept_tokens(self) -> tuple[str, ...]:
        """The markers, which detokenizing must keep in the text."""
        return (self.markers.opening, self.markers.closing) if self.markers else ()

    def constrained(self, grammar: Grammar | None) -> Grammar | None:
        """Return the grammar of the whole text: the block is free, the given grammar begins behind it."""
        return grammar if grammar is None or self.block is None else replace(grammar, block=self.block)

    def reader(self, rest: CallReader) -> CallReader:
        """Return the reader of one text; `rest` reads the text after the block."""
        if self.markers is None:
            return rest
        return ReasoningReader(rest, self.markers, begins_inside=self.begins_inside, keeps_reasoning=self.keeps_reasoning)


NO_REASONING = ReasoningUse()


def reasoning_use(
    support: ReasoningSupport, body: ChatRequest, grammar_param: str | None, prompt_end: Callable[[], str]
) -> ReasoningUse:
    """Return the use of a request; `grammar_param` names the field that constrains its text, if there is one.

    A grammar begins behind the block. If it cannot, it holds for the whole text, so that the model does not reason. If the prompt
    has opened a block, that is refused with InvalidRequest. `prompt_end` returns the text of the prompt's last tokens.
    """
    markers = support.markers
    if markers is None:
        return NO_REASONING
    is_split = body.separate_reasoning is not False
    if grammar_param is None and not is_split:
        return NO_REASONING
    beginning = _beginning(markers, body, prompt_end())
    if beginning is Beginning.BEHIND:
        return NO_REASONING
    is_inside = beginning is Beginning.INSIDE
    use = ReasoningUse(markers, is_inside, body.include_reasoning is not False)
    if grammar_param is None:
        return use
    if support.are_tokens and is_split:
        return replace(use, block=FreeBlock(None if is_inside else markers.opening, markers.closing))
    if is_inside:
        raise _unconstrained(grammar_param, is_split)
    return NO_REASONING


def _unconstrained(grammar_param: str, is_split: bool) -> InvalidRequest:
    if not is_split:
        return InvalidRequest(
            f"{grammar_param} constrains the text behind the reasoning, so it needs separate_reasoning", "separate_reasoning"
        )
    reason = "the prompt opens a reasoning block whose end is no single token of this model, so no grammar can begin behind it"
    return InvalidRequest(f"{grammar_param}: {reason}", grammar_param)


def _beginning(markers: Markers, body: ChatRequest, prompt_end: str) -> Beginning:
    if body.continue_final_message and (text := str(body.messages[-1].to_template().get("content", ""))).strip():
        is_open = text.rfind(markers.opening) > text.rfind(markers.closing)
        return Beginning.INSIDE if is_open else Beginning.BEHIND
    end = prompt_end.rstrip()
    if end.endswith(markers.opening):
        return Beginning.INSIDE
    return Beginning.BEHIND if end.endswith(markers.closing) else Beginning.BEFORE
