"""A machine on paper: steps with known costs, texts with known acceptance, chance from a seed and time from arithmetic.

A policy's choice is run as the engine would run it, and the policy observes the same feedback.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from engine.choice_cache import CachedChoice
from engine.core.policy import (
    BatchViews,
    DraftOutcome,
    ExpansionChoice,
    ExpansionPolicy,
    NodeChances,
    SequenceView,
    StepFeedback,
    StepWork,
)
from engine.core.tree import PLAIN, Expansion, GrowthCosts
from engine.core.types import SamplingParams, Speculation

_CHUNK = 128  # tokens of a prompt fed in a step
_MOST_BEHIND = 64  # tokens that a drafter falls behind a plain sequence


def feedback(
    work: StepWork, outcomes: Sequence[DraftOutcome], draft_s: float, rest_s: float, has_prefill: bool = False
) -> StepFeedback:
    """Return what a policy observes of a step."""
    sizes, reported = (work.num_rows, work.num_rounds, int(work.num_passes)), tuple(outcomes)
    return StepFeedback(draft_s, rest_s, has_prefill, *sizes, lambda: work, lambda: reported)


Chances = Callable[[int, int], float]  # (depth from 1, tokens generated): a drafted token is accepted, given that its parent was


@dataclass(frozen=True)
class Machine:
    """Seconds of a step: a roofline for the target, costs of drafting; each step's are blurred by a factor."""

    base_s: float = 0.010
    row_s: float = 0.0001
    token_s: float = 0.0001
    knee: float = 16.0
    beyond_s: float = 0.0006
    key_s: float = 1e-8
    round_s: float = 0.0
    pass_s: float = 0.001
    draft_token_s: float = 0.00005
    blur: float = 0.0
    outliers: float = 0.0
    choose_s: float = 0.0  # that the policy itself takes for a choice that is not reused

    def rest_s(self, work: StepWork) -> float:
        beyond = max(0.0, work.num_tokens - self.knee)
        seconds = self.base_s + self.row_s * work.num_rows + self.token_s * work.num_tokens + self.beyond_s * beyond
        return seconds + self.key_s * work.num_scores

    def draft_s(self, work: StepWork) -> float:
        rounds_s = self.round_s * work.num_rounds
        return rounds_s + self.pass_s * work.num_passes + self.draft_token_s * work.num_draft_tokens

    def blurred(self, seconds: float, chance: random.Random) -> float:
        factor = 1.0 + self.blur * chance.uniform(-1.0, 1.0)
        return seconds * factor * (5.0 if chance.random() < self.outliers else 1.0)


@dataclass
class Text:
    """One sequence: how its drafts fare. `offers` is the chance that a queried drafter drafts anything at all.

    `cached` is the chance that a tree is drafted from cached text, without the model. A noise-aware tree knows of each
    token its own chance, any of `odds`. At the fork of a tree, n siblings are as good as n to the power of `siblings`
    independent nodes. The first `num_prompt` tokens of the context are a prompt that is still to be fed; the
    drafter is behind by `num_unfed`, the root included; what it is merely fed costs `fed_only_share` of a queried token.
    """

    chances: Chances
    offers: float = 1.0
    cached: float = 0.0
    odds: tuple[float, ...] = ()
    siblings: float = 0.4
    context: int = 200
    num_prompt: int = 0
    num_unfed: int = 1
    fed_only_share: float = 1.0
    temperature: float = 1.0
    max_tokens: int = 10**9
    speculation: Speculation = field(default_factory=Speculation)
    name: str = ""
    num_generated: int = 0

    def view(self, name: str) -> SequenceView:
        sampling = SamplingParams(temperature=self.temperature, max_tokens=self.max_tokens)
        length, remaining = self.context + self.num_generated, self.max_tokens - self.num_generated
        num_uncached = 1 + self.num_prompt
        return SequenceView(name, length, self.num_generated, remaining, num_uncached, sampling, self.speculation, "traversal")

    def expected_tokens(self, expansion: Expansion) -> float:
        """Return E[tau + 1] of such a tree here."""
        alive, total = self.offers, 1.0
        for depth in range(1, expansion.max_depth + 1):
            alive *= 1.0 - (1.0 - self.chances(depth, self.num_generated)) ** self._siblings(expansion, depth)
            total += alive
        return total

    def _siblings(self, expansion: Expansion, depth: int) -> float:
        """Return how many independent nodes compete for acceptance at a depth of a delayed tree."""
        return expansion.branches**self.siblings if depth == expansion.trunk + 1 and expansion.depth else 1.0

    def draft_by_chance(self, expansion: Expansion, growth_costs: GrowthCosts, chance: random.Random) -> tuple[NodeChances, int]:
        """Return the nodes of a noise-aware tree grown here, a chain, with how many of them are accepted, and its rounds."""
        kept: list[float] = []
        probability, accepted, is_alive, rounds = 1.0, 0, True, 0
        least_chances = growth_costs.least_chances(expansion)
        while len(kept) < min(expansion.max_depth, expansion.max_nodes):
            if kept and probability * sum(self.odds) / len(self.odds) < growth_costs.level:
                break
            rounds += 1
            odds = chance.choice(self.odds)
            probability *= odds
            if probability < least_chances[len(kept)]:
                break
            kept.append(probability)
            is_alive = is_alive and chance.random() < odds
            accepted += is_alive
        least = growth_costs.complete_above(expansion, kept)
        return NodeChances(tuple(kept), tuple(range(1, len(kept) + 1)), tuple(range(accepted)), least), rounds

    def draft(self, expansion: Expansion, chance: random.Random) -> tuple[int, int, int]:
        """Return nodes, drafted depth and accepted depth of a tree grown here."""
        if expansion.is_plain or chance.random() >= self.offers:
            return 0, 0, 0
        accepted = 0
        while accepted < expansion.max_depth:
            single = self.chances(accepted + 1, self.num_generated)
            if chance.random() >= 1.0 - (1.0 - single) ** self._siblings(expansion, accepted + 1):
                break
            accepted += 1
        return expansion.num_draft_tokens, expansion.max_depth, accepted


@dataclass
class Ran:
    """What a run brought. Tokens are expected ones: what was chosen is judged, not its luck.

    `predicted` has the seconds that the policy expected of a step and those that it took, where something was expected.
    """

    num_tokens: float = 0.0
    seconds: float = 0.0
    choices: list[tuple[Expansion, ...]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    growth_costs: list[GrowthCosts] = field(default_factory=list)
    predicted: list[tuple[float, float]] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def predicted_share(self) -> float:
        """What was expected of all steps together over what they took."""
        return sum(one for one, _ in self.predicted) / sum(seen for _, seen in self.predicted)


def fixed_rate(machine: Machine, texts: Sequence[Text], expansion: Expansion) -> float:
    """Return the tokens a second of the same tree for all, drafted whole by a drafter that is not behind."""
    num_nodes, num_rows = expansion.num_draft_tokens, len(texts)
    num_keys = sum(text.context for text in texts)
    num_fed = 0 if expansion.is_plain else num_rows * (1 + _num_inner(expansion))
    tokens, depth = num_rows * (1 + num_nodes), expansion.max_depth
    work = StepWork(num_rows, tokens, tokens, num_keys, (1 + num_nodes) * num_keys, depth, num_fed, depth)
    expected = sum(text.expected_tokens(expansion) for text in texts)
    return expected / (machine.rest_s(work) + machine.draft_s(work))


def flat(chance: float) -> Chances:
    """Return the same chance at every depth and time."""
    return lambda depth, num_generated: chance


def run(
    policy: ExpansionPolicy,
    machine: Machine,
    texts: Sequence[Text],
    num_steps: int,
    seed: int = 0,
    shown: Callable[[list[SequenceView]], Sequence[SequenceView]] = list,
) -> Ran:
    """Run steps over all texts, as the engine does: a choice is reused for its steps while all of them decode.

    The machine's true seconds count; the policy observes blurred ones, and is shown what `shown` makes of the views.
    """
    chance, ran, counted = random.Random(seed), Ran(), _CountingPolicy(policy, shown)
    cache = CachedChoice(counted)
    for _ in range(num_steps):
        views = [text.view(text.name or str(index)) for index, text in enumerate(texts)]
        composition = None if any(text.num_prompt for text in texts) else 0
        choice = cache.choose(BatchViews(partial(list, views), len(views), composition))
        step = _Step(choice, len(texts))
        for text, view, wished in zip(texts, views, choice.expansions, strict=True):
            if text.num_prompt:
                step.feed_prompt(text)
            else:
                ran.num_tokens += step.decode(text, view, wished, chance)
        work = step.work
        draft_s, rest_s = machine.draft_s(work), machine.rest_s(work)
        ran.seconds += draft_s + rest_s + machine.choose_s * counted.take_count()
        ran.choices.append(choice.expansions)
        ran.reasons.append(choice.reason)
        ran.growth_costs.append(choice.growth_costs)
        if choice.step_s is not None:
            ran.predicted.append((choice.step_s, draft_s + rest_s))
        blurred = machine.blurred(draft_s, chance), machine.blurred(rest_s, chance)
        policy.observe(feedback(work, tuple(step.outcomes), *blurred, has_prefill=step.has_prefill))
    return ran


class _CountingPolicy:
    """A policy that counts how often it chooses."""

    def __init__(self, policy: ExpansionPolicy, shown: Callable[[list[SequenceView]], Sequence[SequenceView]]) -> None:
        self.name, self._policy, self._shown, self._count = policy.name, policy, shown, 0

    def choose(self, views: Sequence[SequenceView]) -> ExpansionChoice:
        self._count += 1
        return self._policy.choose(self._shown([*views]))

    def observe(self, feedback: StepFeedback) -> None:
        self._policy.observe(feedback)

    def take_count(self) -> int:
        count, self._count = self._count, 0
        return count


class _Step:
    """Adds up what a step runs, as the engine would run it."""

    def __init__(self, choice: ExpansionChoice, num_rows: int) -> None:
        self.outcomes: list[DraftOutcome] = []
        self.has_prefill = False
        self._keeps_up = choice.keeps_up
        self._growth_costs = choice.growth_costs
        self._num_rows = num_rows
        self._sums = dict.fromkeys(("num_tokens", "num_drawn", "num_keys", "num_scores"), 0)
        self._num_fed = 0.0
        self._num_passes = self._num_rounds = 0

    @property
    def work(self) -> StepWork:
        passes, rounds = self._num_passes, self._num_rounds
        return StepWork(self._num_rows, **self._sums, num_passes=passes, num_draft_tokens=self._num_fed, num_rounds=rounds)

    def feed_prompt(self, text: Text) -> None:
        """Feed a chunk to both models."""
        chunk = min(text.num_prompt, _CHUNK)
        text.num_prompt -= chunk
        text.num_unfed = max(1, text.num_unfed - chunk)
        self._add(text.context, num_tokens=chunk, num_drawn=0, num_fed=text.fed_only_share * chunk)
        self.has_prefill, self._num_passes = True, max(1, self._num_passes)

    def decode(self, text: Text, view: SequenceView, wished: Expansion, chance: random.Random) -> float:
        """Draft and accept; return the tokens that were to be expected."""
        expansion = _granted(text, wished)
        is_cached = chance.random() < text.cached
        grown = None
        if not text.odds or expansion.is_plain:
            expected = text.expected_tokens(expansion)
            nodes, drafted, accepted = text.draft(expansion, chance)
            rounds = min(expansion.max_depth, drafted + 1)
        else:
            grown, rounds = text.draft_by_chance(expansion, self._growth_costs, chance)
            expected = 1.0 + sum(grown.chances)
            nodes = drafted = len(grown.chances)
            accepted = len(grown.accepted)
        self.outcomes.append(
            DraftOutcome(view.request_id, expansion, nodes, drafted if grown is None else rounds, accepted, grown)
        )
        num_fed = 0.0
        if not expansion.is_plain:
            self._num_rounds = max(self._num_rounds, rounds)
            if not is_cached:
                self._num_passes = max(self._num_passes, rounds)
                num_inner = _num_inner(expansion) if grown is None else min(nodes, rounds - 1)
                num_fed = 1 + text.fed_only_share * (text.num_unfed - 1) + (num_inner if drafted else 0)
                text.num_unfed = -min(accepted, max(0, drafted - 1))  # of the path all but a leaf has been fed
        elif self._keeps_up and text.num_unfed > _MOST_BEHIND:
            self._num_passes = max(1, self._num_passes)
            num_fed, text.num_unfed = text.fed_only_share * text.num_unfed, 0
        text.num_unfed += accepted + 1
        text.num_generated += accepted + 1
        self._add(view.num_committed, 1 + nodes, (1 + nodes) if text.temperature else 0, num_fed)
        return expected

    def _add(self, num_keys: int, num_tokens: int, num_drawn: int, num_fed: float) -> None:
        self._num_fed += num_fed
        amounts = (num_tokens, num_drawn, num_keys, num_tokens * num_keys)
        for name, amount in zip(self._sums, amounts, strict=True):
            self._sums[name] += amount


def _granted(text: Text, wished: Expansion) -> Expansion:
    """Return what the scheduler makes of a wish."""
    speculation = text.speculation
    if not speculation.is_enabled:
        return PLAIN
    tree = speculation.expansion or wished
    most = tree.num_draft_tokens if speculation.max_nodes is None else speculation.max_nodes
    return tree.limited(max(0, text.max_tokens - text.num_generated - 1), most)


def _num_inner(expansion: Expansion) -> int:
    """Return the nodes of a whole tree that are fed to the drafter: all but the last level's."""
    return expansion.num_draft_tokens - (expansion.branches if expansion.depth else 1)
