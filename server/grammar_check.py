"""Whether a grammar can be honoured, asked before a request is queued: compiled beside the event loop, within bounds.

Knows grammars and work. Does not know requests.
"""

from collections.abc import Callable

from engine.grammars import BadGrammar, CompiledGrammars, Vocabulary
from engine.types import Grammar
from server.errors import InvalidRequest, Overloaded
from server.tokenizer_thread import TokenizerBusy, TokenizerClosed, TokenizerThread

_MAX_WAITING_CHARS = 1 << 20  # some seconds of compiling
_RETRY_S = 2.0


class GrammarCheck:
    """Owns compiled grammars and the thread that compiles. The vocabulary is loaded with the first: that takes seconds."""

    def __init__(self, load: Callable[[], Vocabulary]) -> None:
        self._grammars = CompiledGrammars(load)
        self._thread = TokenizerThread(_MAX_WAITING_CHARS)

    async def require(self, grammar: Grammar, param: str) -> None:
        """Raise InvalidRequest with the library's reason unless texts can be held to the grammar, Overloaded if too many wait."""
        try:
            await self._thread.run(len(grammar.text), lambda: self._grammars.matcher(grammar))
        except BadGrammar as error:
            raise InvalidRequest(f"{param}: {error}", param) from error
        except TokenizerBusy as error:
            raise Overloaded("too many grammars wait to be compiled", "grammars_busy", _RETRY_S) from error
        except TokenizerClosed as error:
            raise Overloaded("the server is shutting down", "engine_unavailable", _RETRY_S) from error

    def close(self) -> None:
        """End the thread."""
        self._thread.close()
