"""A drafter together with cached text."""

from collections import Counter
from typing import Any

from engine.core.config import SchedulerConfig
from engine.core.policy import FixedExpansion
from engine.core.tree import Expansion
from engine.core.types import DraftSource
from engine.draft.text.text_cache import TextCache
from engine.draft.text_and_model import CombinedDrafter
from engine.testing import tiny_engine
from tests.model.driving import greedy, run, sampled
from tests.model.mixed import PROMPTS
from tests.model.passes import CPU
from tests.model.tiny import model


def require_plain_texts_beside_cached_text(drafter: Any, config: SchedulerConfig) -> None:
    """Require that texts are those without drafts, and that both the drafter and cached text draft."""
    combined = CombinedDrafter(drafter, TextCache(), 61, CPU)
    engine = tiny_engine(model("llama"), combined, FixedExpansion(Expansion(2, 2, 2)), config=config)
    engine.target.report_to(drafter)
    requests = [greedy("a", PROMPTS[0] * 5, max_tokens=24), sampled("b", PROMPTS[0] * 3, seed=1, max_tokens=24)]
    session = run(engine, requests)
    assert session.texts() == run(tiny_engine(model("llama")), requests).texts()
    drafted = Counter[str]()
    for stats in session.stats:
        drafted.update(stats.drafted_by_source)
    assert min(drafted[DraftSource.CACHE], drafted[DraftSource.MODEL]) > 10
