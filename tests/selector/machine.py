"""A machine on paper: steps with known costs, texts with known acceptance, chance from a seed and time from arithmetic.

What a policy chooses is run as the engine would run it, and it is told what the engine would tell it.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.policy import DraftOutcome, ExpansionPolicy, SequenceView, StepFeedback, StepWork
from engine.tree import Expansion
from engine.types import SamplingParams, Speculation

Chances = Callable[[int, int], float]  # (depth from 1, tokens generated): a drafted token is accepted, given that its parent was


@dataclass(frozen=True)
class Machine:
    """Seconds of a step: a roofline for the target, prices for drafting; each step's are blurred by a factor."""

    base_s: float = 0.010
    row_s: float = 0.0001
    token_s: float = 0.0001
    knee: float = 16.0
    beyond_s: float = 0.0006
    key_s: float = 1e-8
    pass_s: float = 0.001
    draft_token_s: float = 0.00005
    blur: float = 0.0
    outliers: float = 0.0

    def rest_s(self, work: StepWork) -> float:
        beyond = max(0.0, work.num_tokens - self.knee)
        seconds = self.base_s + self.row_s * work.num_rows + self.token_s * work.num_tokens + self.beyond_s * beyond
        return seconds + self.key_s * work.num_scores

    def draft_s(self, work: StepWork) -> float:
        return self.pass_s * work.num_passes + self.draft_token_s * work.num_draft_tokens

    def blurred(self, seconds: float, chance: random.Random) -> float:
        factor = 1.0 + self.blur * chance.uniform(-1.0, 1.0)
        return seconds * factor * (5.0 if chance.random() < self.outliers else 1.0)


@dataclass
class Text:
    """One sequence: how its drafts fare. `offers` is the chance that a drafter that was asked has anything to say at all."""

    chances: Chances
    offers: float = 1.0
    context: int = 200
    temperature: float = 1.0
    max_tokens: int = 10**9
    speculation: Speculation = field(default_factory=Speculation)
    name: str = ""
    num_generated: int = 0

    def view(self, name: str) -> SequenceView:
        sampling = SamplingParams(temperature=self.temperature, max_tokens=self.max_tokens)
        length, remaining = self.context + self.num_generated, self.max_tokens - self.num_generated
        return SequenceView(name, length, self.num_generated, remaining, 1, 1, sampling, self.speculation, "traversal")

    def expected_tokens(self, expansion: Expansion) -> float:
        """Return E[tau + 1] of such a tree here."""
        alive, total = self.offers, 1.0
        for depth in range(1, expansion.max_depth + 1):
            branches = expansion.branches if depth == expansion.trunk + 1 and expansion.depth else 1
            alive *= 1.0 - (1.0 - self.chances(depth, self.num_generated)) ** branches
            total += alive
        return total

    def draft(self, expansion: Expansion, chance: random.Random) -> tuple[int, int, int]:
        """Return nodes, drafted depth and accepted depth of a tree grown here."""
        if expansion.is_plain or chance.random() >= self.offers:
            return 0, 0, 0
        accepted = 0
        while accepted < expansion.max_depth:
            branches = expansion.branches if accepted == expansion.trunk and expansion.depth else 1
            single = self.chances(accepted + 1, self.num_generated)
            if chance.random() >= 1.0 - (1.0 - single) ** branches:
                break
            accepted += 1
        return expansion.num_draft_tokens, expansion.max_depth, accepted


@dataclass
class Ran:
    """What a run brought. Tokens are expected ones: what was chosen is judged, not its luck."""

    num_tokens: float = 0.0
    seconds: float = 0.0
    choices: list[tuple[Expansion, ...]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.num_tokens / self.seconds


def fixed_rate(machine: Machine, texts: Sequence[Text], expansion: Expansion) -> float:
    """Return the tokens a second of the same tree for all, drafted whole."""
    num_nodes, num_rows = expansion.num_draft_tokens, len(texts)
    num_keys = sum(text.context for text in texts)
    num_fed = 0 if expansion.is_plain else num_rows * (1 + num_nodes - (expansion.branches if expansion.depth else 1))
    tokens = num_rows * (1 + num_nodes)
    work = StepWork(num_rows, tokens, tokens, num_keys, (1 + num_nodes) * num_keys, expansion.max_depth, num_fed)
    expected = sum(text.expected_tokens(expansion) for text in texts)
    return expected / (machine.rest_s(work) + machine.draft_s(work))


def flat(chance: float) -> Chances:
    """Return the same chance at every depth and time."""
    return lambda depth, num_generated: chance


def run(policy: ExpansionPolicy, machine: Machine, texts: Sequence[Text], num_steps: int, seed: int = 0) -> Ran:
    """Run steps over all texts. The machine's true seconds count; the policy is told blurred ones."""
    chance, ran = random.Random(seed), Ran()
    for _ in range(num_steps):
        views = [text.view(text.name or str(index)) for index, text in enumerate(texts)]
        choice = policy.choose(views)
        outcomes, work = [], dict.fromkeys(("num_tokens", "num_scores", "num_passes", "num_draft_tokens"), 0)
        for text, view, wished in zip(texts, views, choice.expansions, strict=True):
            expansion = wished if text.speculation.is_enabled else Expansion(0, 1, 0)
            ran.num_tokens += text.expected_tokens(expansion)
            nodes, drafted, accepted = text.draft(expansion, chance)
            outcomes.append(DraftOutcome(view.request_id, expansion, nodes, drafted, accepted))
            work["num_tokens"] += 1 + nodes
            work["num_scores"] += (1 + nodes) * view.num_committed
            work["num_passes"] = max(work["num_passes"], min(expansion.max_depth, drafted + 1))
            if not expansion.is_plain:
                fed = expansion.num_draft_tokens - (expansion.branches if expansion.depth else 1)
                work["num_draft_tokens"] += 1 + (fed if drafted else 0)
            text.num_generated += accepted + 1
        num_drawn = sum(1 + one.num_nodes for one, text in zip(outcomes, texts, strict=True) if text.temperature)
        num_keys = sum(view.num_committed for view in views)
        done = StepWork(len(texts), num_drawn=num_drawn, num_keys=num_keys, **work)
        draft_s, rest_s = machine.draft_s(done), machine.rest_s(done)
        ran.seconds += draft_s + rest_s
        ran.choices.append(choice.expansions)
        ran.reasons.append(choice.reason)
        blurred = machine.blurred(draft_s, chance), machine.blurred(rest_s, chance)
        policy.observe(StepFeedback(done, tuple(outcomes), *blurred, has_prefill=False))
    return ran
