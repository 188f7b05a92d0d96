"""How well a policy does on the paper machine: ratios of rates, the same at every run.

The contract of a policy. The tests hold it to bounds and benchmarks.policy_ablation prints what each of its mechanisms adds.
"""

from collections.abc import Sequence
from functools import cache

from engine.core.policy import ExpansionChoice, ExpansionPolicy, SequenceView, StepFeedback
from engine.core.tree import PLAIN, Expansion
from selector.acceptance import CountedAcceptance, Estimator
from selector.cost import KNOTS, CostModel
from selector.menu import Menu, menu_of
from selector.policy import AdaptiveExpansion
from tests.selector.machine import Chances, Machine, Ran, Text, fixed_rate, flat, run

CHAIN = Expansion(4, 1, 0)
NOISY = {"blur": 0.15, "outliers": 0.01}
CHEAP, USUAL, DEAR = Machine(pass_s=0.0001, **NOISY), Machine(**NOISY), Machine(pass_s=0.004, **NOISY)
MACHINES = {"cheap": CHEAP, "usual": USUAL, "dear": DEAR}
MENU = menu_of(CHAIN, "traversal", Expansion(4, 3, 4))
BY_CHANCE = menu_of(Expansion(0, 4, 8, "noise_aware", 32), "coupled")
SURE_OR_NOT = (0.98, 0.98, 0.9, 0.3, 0.1)  # chances of tokens, known as soon as they are drafted and not before
CHANGES = ((0.9, 0.0), (0.0, 0.9), (0.3, 0.9), (0.9, 0.3))
WRONG = 100.0  # times the true costs, of a wrong profile


def coefficients_of(machine: Machine, slower: float = 1.0) -> tuple[list[float], list[float]]:
    """Return the machine's costs as a profile would have them, wrong by up to 8 % here and there, those of tokens by `slower`."""

    def target_s(tokens: float) -> float:
        return machine.base_s + machine.token_s * tokens + machine.beyond_s * max(0.0, tokens - machine.knee)

    ends = (*KNOTS[1:], 1024)
    slopes = [slower * (target_s(end) - target_s(start)) / (end - start) for start, end in zip(KNOTS, ends, strict=True)]
    rest = [target_s(1.0), *slopes, machine.row_s, 1e-7, 1e-7, max(1e-9, 1000 * machine.key_s), 1e-7]
    factors = [1.0 + 0.08 * (place * 7 % 13 - 6) / 6 for place in range(len(rest))]
    draft = [1e-7, machine.pass_s, machine.draft_token_s, 1e-7]
    return [value * factor for value, factor in zip(rest, factors, strict=True)], [slower * value for value in draft]


def adaptive(
    machine: Machine,
    menu: Menu = MENU,
    kind: type[AdaptiveExpansion] = AdaptiveExpansion,
    estimator: Estimator | None = None,
    slower: float = 1.0,
) -> AdaptiveExpansion:
    """Return a policy with a profile of the machine."""
    costs = CostModel(*coefficients_of(machine, slower))
    return kind(menu, estimator or CountedAcceptance(menu), costs)


def texts_of(chance: float, num_texts: int) -> list[Text]:
    """Return texts whose drafted tokens are all accepted with one chance."""
    return [Text(flat(chance), context=100 + 10 * index) for index in range(num_texts)]


def best_fixed(machine: Machine, texts: Sequence[Text], menu: Menu = MENU) -> float:
    """Return the tokens a second of the best entry of a menu."""
    return max(fixed_rate(machine, texts, entry) for entry in menu.entries)


def share_of_best(policy: ExpansionPolicy, machine: Machine, num_texts: int, chance: float) -> float:
    """Return a policy's tokens a second after a warm-up, over those of the best fixed choice."""
    texts = texts_of(chance, num_texts)
    warm_up, steps = (100, 150) if num_texts < 32 else (40, 60)
    run(policy, machine, texts, warm_up)
    return run(policy, machine, texts, steps, seed=1).rate / best_fixed(machine, texts)


def near_best_fixed() -> dict[tuple[str, int, float], float]:
    """Return the shares of the best fixed choice: useless to perfect drafts, 1 to 32 sequences, cheap to dear drafters."""
    return {
        (name, count, chance): share_of_best(adaptive(machine), machine, count, chance)
        for name, machine in MACHINES.items()
        for count in (1, 4, 32)
        for chance in (0.0, 0.3, 0.7, 1.0)
    }


def useless_drafter(policy: AdaptiveExpansion | None = None, machine: Machine = DEAR) -> float:
    """Return a policy's rate over plain decoding's with a useless drafter, after a warm-up of 50 steps."""
    policy, texts = policy or adaptive(machine), texts_of(0.0, 1)
    run(policy, machine, texts, 50)
    return run(policy, machine, texts, 400, seed=1).rate / fixed_rate(machine, texts, PLAIN)


def around_a_change(before: float, after: float, num_steps: int = 300) -> Ran:
    """Return what ran after the first 100 steps or so of a text whose acceptance changes at its 400th token."""
    chances: Chances = lambda depth, num_generated: before if num_generated < 400 else after  # noqa: E731
    text, policy = Text(chances, context=100), adaptive(USUAL)
    while text.num_generated < 400:
        run(policy, USUAL, [text], min(16, 400 - text.num_generated))
    run(policy, USUAL, [text], 100, seed=1)
    return run(policy, USUAL, [text], num_steps, seed=2)


def after_changes() -> dict[tuple[float, float], float]:
    """Return the shares of the best fixed choice after each change."""
    return {
        (before, after): around_a_change(before, after).rate / best_fixed(USUAL, texts_of(after, 1)) for before, after in CHANGES
    }


def unlike_texts() -> list[Text]:
    """Return eight texts; drafting pays for every other one."""
    return [Text(flat(0.9 if index % 2 else 0.05), context=100) for index in range(8)]


def unlike_sequences() -> float:
    """Return the rate for unlike sequences over that of the best tree for all."""
    policy, texts = adaptive(USUAL), unlike_texts()
    run(policy, USUAL, texts, 200)
    return run(policy, USUAL, texts, 50, seed=1).rate / best_fixed(USUAL, texts)


class Always:
    """The same tree for all, grown whole."""

    def __init__(self, expansion: Expansion) -> None:
        self.name, self._expansion = "always", expansion

    def choose(self, views: Sequence[SequenceView]) -> ExpansionChoice:
        return ExpansionChoice((self._expansion,) * len(views))

    def observe(self, feedback: StepFeedback) -> None:
        pass


def texts_by_chance(odds: tuple[float, ...], num_texts: int) -> list[Text]:
    """Return texts whose noise-aware trees know each token's chance, one of `odds`."""
    return [Text(flat(0.0), odds=odds, context=100, temperature=0.0) for _ in range(num_texts)]


def rate_by_chance(machine: Machine, odds: tuple[float, ...], num_texts: int, policy: ExpansionPolicy) -> float:
    """Return a policy's tokens a second for such texts, after a warm-up."""
    texts = texts_by_chance(odds, num_texts)
    run(policy, machine, texts, 100)
    return run(policy, machine, texts, 300, seed=1).rate


@cache
def best_by_chance(machine: Machine, num_texts: int) -> float:
    """Return the rate of the best least chance, which no policy changes."""
    return max(rate_by_chance(machine, SURE_OR_NOT, num_texts, Always(entry)) for entry in BY_CHANCE.entries)


def share_by_chance(policy: ExpansionPolicy, machine: Machine, num_texts: int) -> float:
    """Return a policy's rate over that of the best least chance."""
    return rate_by_chance(machine, SURE_OR_NOT, num_texts, policy) / best_by_chance(machine, num_texts)


def noise_aware() -> dict[tuple[str, int], float]:
    """Return the shares of the best least chance."""
    return {
        (name, count): share_by_chance(adaptive(machine, BY_CHANCE), machine, count)
        for name, machine in MACHINES.items()
        for count in (1, 4, 16)
    }


def wrong_profile() -> dict[int, float]:
    """Return the shares of the best fixed choice after 800 steps, where a profile has tokens and drafting 100 times too dear."""
    shares = {}
    for count in (1, 4):
        policy, texts = adaptive(USUAL, slower=WRONG), texts_of(0.9, count)
        run(policy, USUAL, texts, 800)
        shares[count] = run(policy, USUAL, texts, 100, seed=1).rate / best_fixed(USUAL, texts)
    return shares


def dear_drafter(factor: float = 300.0) -> float:
    """Return thirty steps' rate over plain decoding's, where a pass takes that many times as long as its profile predicts."""
    truly = Machine(pass_s=factor * USUAL.pass_s)
    policy, texts = adaptive(USUAL), texts_of(0.9, 1)
    run(policy, truly, texts, 100)
    return run(policy, truly, texts, 3000).rate / fixed_rate(truly, texts, PLAIN)
