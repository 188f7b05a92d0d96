"""Random lives of an engine over tiny real models: requests come and are cancelled, slots run out, engines die and are followed.

The canary watches every slot that is read. The reported tokens are kept as a front end keeps them, for the next engine.
"""

from dataclasses import dataclass, field, replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.core.config import SchedulerConfig
from engine.core.policy import ExpansionChoice
from engine.core.tree import FREE_GROWTH, Expansion
from engine.core.types import FinishReason, Progress, Request, SamplingParams, Speculation, TokenEvent
from engine.engine import Engine
from engine.testing import tiny_engine
from tests.model.tiny import model, pair
from tests.strategies import any_expansions, growth_costs

_LONGEST = 24  # tokens of a request, prompt and answer
_COUPLED, _IID = Speculation(), Speculation(verifier="traversal")
_PROMPTS = st.builds(  # many begin alike
    lambda num_common, own: (*range(3, 3 + num_common), *own),
    st.sampled_from([0, 6, 9]),
    st.lists(st.integers(3, 60), min_size=1, max_size=5),
)
_DRAFTS = st.builds(
    Request,
    request_id=st.just(""),
    prompt_ids=_PROMPTS,
    sampling=st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.9]),
        seed=st.integers(0, 99),
        max_tokens=st.integers(0, _LONGEST - 14),
        ignore_eos=st.just(True),
    ),
    speculation=st.sampled_from([_COUPLED, _IID]),
)


class Wishes:
    """A policy that takes its trees from the caller of the engine."""

    name = "wishes"

    def __init__(self) -> None:
        self.next = [Expansion(0, 1, 0)]
        self.growth_costs = FREE_GROWTH

    def choose(self, views):
        return ExpansionChoice(
            tuple(self.next[index % len(self.next)] for index in range(len(views))), growth_costs=self.growth_costs
        )

    def observe(self, feedback):
        pass


@dataclass
class Life:
    """A request and its tokens so far, from any number of engines."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    finish: FinishReason | None = None

    def take(self, event: TokenEvent) -> None:
        assert self.finish is None, f"{event.request_id} spoke after its end"
        self.token_ids.extend(event.token_ids)
        self.finish = event.finish
        assert len(self.token_ids) <= self.request.sampling.max_tokens


def plain_text(request: Request) -> list[int]:
    """Return the tokens of plain decoding."""
    engine = tiny_engine(model("llama"))
    engine.add(replace(request, speculation=Speculation(is_enabled=False)))
    token_ids: list[int] = []
    while engine.has_work:
        token_ids += [token_id for event in engine.step().events for token_id in event.token_ids]
    return token_ids


class EngineMachine(RuleBasedStateMachine):
    """One engine at a time, with a small pool."""

    def __init__(self) -> None:
        super().__init__()
        self.lives: dict[str, Life] = {}
        self.num_reported = self.num_counted = self.num_used_slots = 0
        self.is_mid_step = False

    @initialize(
        num_slots=st.integers(_LONGEST, _LONGEST + 8),
        max_running=st.integers(1, 4),
        max_step_tokens=st.integers(4, 24),
        has_drafter=st.booleans(),
        drafts=st.lists(_DRAFTS, min_size=2, max_size=4),
    )
    def begin(self, num_slots, max_running, max_step_tokens, has_drafter, drafts):
        self.config = SchedulerConfig(
            max_running=max_running,
            max_step_tokens=max_step_tokens,
            num_slots=num_slots,
            max_model_len=_LONGEST,
            prefix_block_tokens=3,
        )
        self.has_drafter = has_drafter
        self.engine = self.new_engine()
        for draft in drafts:
            self.submit(draft)

    def new_engine(self) -> Engine:
        self.wishes = Wishes()
        draft = pair("llama")[1] if self.has_drafter else None
        return tiny_engine(pair("llama")[0], draft, self.wishes, config=self.config, has_canary=True)

    @rule(draft=_DRAFTS)
    def submit(self, draft):
        request = replace(draft, request_id=str(len(self.lives)))
        self.lives[request.request_id] = Life(request)
        self.engine.add(request)

    @property
    def alive(self) -> list[str]:
        return [request_id for request_id, life in self.lives.items() if life.finish is None]

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def cancel(self, data):
        request_id = data.draw(st.sampled_from(self.alive))
        self.engine.abort(request_id)
        self.step()
        assert self.lives[request_id].finish is FinishReason.ABORT

    @precondition(lambda self: self.alive)
    @rule(
        wishes=st.lists(any_expansions(max_nodes=6), min_size=1, max_size=4), growth_costs=growth_costs(), count=st.integers(1, 4)
    )
    def steps(self, wishes, growth_costs, count):
        self.wishes.next, self.wishes.growth_costs = wishes, growth_costs
        for _ in range(count):
            self.step()

    def step(self) -> None:
        self.is_mid_step = True
        output = self.engine.step()
        self.num_used_slots = output.stats.num_used_slots
        self.num_counted += output.stats.num_generated_tokens
        for event in output.events:
            self.num_reported += len(event.token_ids)
            self.lives[event.request_id].take(event)
        self.engine.check_integrity()
        self.is_mid_step = False

    @precondition(lambda self: self.alive)
    @rule()
    def die(self):
        """The engine is gone, and another continues from the reported tokens."""
        self.engine = self.new_engine()
        for request_id in self.alive:
            life = self.lives[request_id]
            self.engine.add(self.resumed(life))

    def resumed(self, life: Life) -> Request:
        return replace(life.request, progress=Progress(tuple(life.token_ids)))

    @invariant()
    def accounts_agree(self):
        num_tokens = sum(len(life.token_ids) for life in self.lives.values())
        assert num_tokens == self.num_reported == self.num_counted
        assert not self.lives or self.engine.has_work == bool(self.alive)

    def teardown(self):
        """Every request ends, at no less than a token of the oldest a step; a text that is a function of its request is right."""
        if not self.lives or self.is_mid_step:  # nothing began, or a step failed and reports it itself
            return
        for _ in range(_LONGEST * len(self.alive)):
            if self.alive:
                self.step()
        assert not self.alive
        assert self.num_used_slots == 0
        for life in self.lives.values():
            if life.request.speculation == _COUPLED or life.request.sampling.is_greedy:
                whole = plain_text(life.request)
                assert life.token_ids == whole[: len(life.token_ids)]
                assert life.finish is FinishReason.ABORT or len(life.token_ids) == len(whole)
