"""The process in which grammars are tried: some small schemas take the library minutes, and only a process can be ended.

Knows one vocabulary and grammars. Used from one thread.
"""

import multiprocessing
import signal
import threading
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from engine.grammars import BadGrammar, CompiledGrammars, VocabularySource, require_first_mask
from engine.types import Grammar
from engine.worker import die_with_parent

_DEADLINE_S = 4.0  # whole books of schemas compile in a tenth of it
_START_S = 120.0


class GrammarProcess:
    """Owns the process; begun when first needed, replaced after it was ended. What is tried in it is compiled once."""

    def __init__(self) -> None:
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None

    def check(self, source: VocabularySource, grammar: Grammar) -> None:
        """Raise BadGrammar unless texts can be held to the grammar and it compiles in time."""
        if self._process is None or not self._process.is_alive():
            self._start(source)
        self._ask(grammar, _DEADLINE_S, f"it takes longer than {_DEADLINE_S:g} s to compile")

    def close(self) -> None:
        """End the process, whatever it does."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()

    def _start(self, source: VocabularySource) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), name="latebranch-grammars", daemon=True)
        self._process.start()
        theirs.close()
        self._ask(source, _START_S, "the model's tokenizer takes too long to load")

    def _ask(self, question: VocabularySource | Grammar, limit_s: float, lateness: str) -> None:
        """Send a question and wait for the reason why not; none is a yes."""
        assert self._pipe is not None
        try:
            self._pipe.send(question)
            if not self._pipe.poll(limit_s):
                self.close()
                raise BadGrammar(lateness)
            reason = self._pipe.recv()
        except (EOFError, OSError) as error:  # it died of the question
            self.close()
            raise BadGrammar("the library cannot compile it") from error
        if reason is not None:
            raise BadGrammar(reason)


def _serve(pipe: Connection) -> None:
    """Be the process: answer until the other end of the pipe is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=die_with_parent, name="die-with-parent", daemon=True).start()
    grammars: CompiledGrammars | None = None
    while True:
        try:
            question = pipe.recv()
        except EOFError:
            return
        try:
            if isinstance(question, VocabularySource):
                grammars = CompiledGrammars(question.load)
                _ = grammars.vocabulary
            elif grammars is not None:
                require_first_mask(grammars.matcher(question))
            pipe.send(None)
        except BadGrammar as error:
            pipe.send(str(error))
