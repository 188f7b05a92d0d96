"""Checks whether a grammar can be honoured, before a request is queued: off the event loop, with bounded time and queue.

Knows grammars and how many may wait. Does not know requests.
"""

from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable

from engine.core.types import Grammar
from engine.structured_output.grammars import BadGrammar, VocabularySource
from server.fair_lock import FairLock
from server.grammar.process import GrammarProcess, GrammarProcessFailed
from server.http.errors import InvalidRequest, Overloaded
from server.text.tokenizer_thread import TokenizerClosed, TokenizerThread

_MAX_WAITING_CHARS = 1 << 18  # of one key
_RETRY_S = 2.0
_MAX_KNOWN = 64


class GrammarCheck:
    """Owns the process that compiles grammars, and the thread that waits for it. `describe` is called for the first grammar.

    A grammar that was accepted recently is not compiled again, so it does not wait behind slow grammars of other keys. Other
    grammars are compiled one at a time, and keys take turns.
    """

    def __init__(self, describe: Callable[[], Awaitable[VocabularySource]]) -> None:
        self._describe = describe
        self._source: VocabularySource | None = None
        self._known: OrderedDict[Grammar, None] = OrderedDict()
        self._process = GrammarProcess()
        self._thread = TokenizerThread()
        self._turns = FairLock()
        self._waiting_chars = Counter[str]()

    async def require(self, grammar: Grammar, param: str, key: str) -> None:
        """Raise InvalidRequest with the library's reason if the grammar cannot be used. Raise Overloaded if too many grammars of
        the key wait or the process fails.
        """
        if grammar not in self._known:
            await self._try(grammar, param, key)
        self._known[grammar] = None
        self._known.move_to_end(grammar)
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)

    async def _try(self, grammar: Grammar, param: str, key: str) -> None:
        if self._waiting_chars[key] and self._waiting_chars[key] + len(grammar.text) > _MAX_WAITING_CHARS:
            raise Overloaded("too many grammars wait to be compiled", "grammars_busy", _RETRY_S)
        self._waiting_chars[key] += len(grammar.text)
        try:
            async with self._turns.turn(key):
                source = self._source = self._source or await self._describe()
                await self._thread.run(0, lambda: self._process.check(source, grammar))
        except BadGrammar as error:
            raise InvalidRequest(f"{param}: {error}", param) from error
        except GrammarProcessFailed as error:
            raise Overloaded(f"grammars cannot be compiled now: {error}", "grammars_unavailable", _RETRY_S) from error
        except TokenizerClosed as error:
            raise Overloaded("the server is shutting down", "engine_unavailable", _RETRY_S) from error
        finally:
            self._waiting_chars[key] -= len(grammar.text)

    def close(self) -> None:
        """End the thread and the process."""
        self._thread.close()
        self._process.close()
