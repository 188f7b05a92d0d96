"""LoRA: a request under an adapter has the texts and the distribution of the merged model, whatever shares its batch."""

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from engine.core.policy import FixedExpansion
from engine.core.step_plan import Feeding
from engine.core.tree import Expansion
from engine.core.types import Progress, Request, SamplingParams, Speculation
from engine.core.validation import RequestRefused
from engine.draft.models.draft_model import ModelDrafter
from engine.draft.models.early_exit import Lens, early_exit_drafter
from engine.draft.text.text_cache import TextCache
from engine.draft.text.text_drafter import TextDrafter
from engine.engine import Engine
from engine.kv_cache.kv_cache import KVCache
from engine.model.adapters import AdaptedRows
from engine.model.causal_lm import CausalModel, adopt
from engine.model.linear_backends import NATIVE
from engine.scheduler.sequence import Sequence
from engine.teacher_forcing import KnownText
from engine.testing import FAMILIES, tiny_engine, tiny_module
from tests.chi_square import FAILS_ABOVE, PASSES_BELOW, z_of_counts
from tests.model.distributions import text_distribution
from tests.model.driving import give_drafter, greedy, run
from tests.model.engine.test_engine_distributions import WIDE
from tests.model.lora import merged, random_adapter
from tests.model.passes import CPU
from tests.model.tiny import model
from tests.needs import needs_library

PROMPT = [3 + (11 * i) % 7 for i in range(40)]  # longer than two blocks of the prefix cache, and repeats itself
NAMES = (None, "one", "two")
SAMPLING = SamplingParams(temperature=1.5, top_k=3, max_tokens=3, ignore_eos=True)
DRAFTERS = ("none", "model", "ngram", "early exit")
LINEARS = ("packed", pytest.param(NATIVE, marks=needs_library))


def adapted_model(family: str = "llama", linears: str = "packed") -> CausalModel:
    target = adopt(tiny_module(family), CPU, linears)
    target.add_adapters([random_adapter(name, family, seed) for name, seed in (("one", 1), ("two", 2))])
    return target


def engine_of(drafter: str = "model", family: str = "llama", linears: str = "packed", **options) -> Engine:
    engine = tiny_engine(adapted_model(family, linears), None, FixedExpansion(Expansion(1, 2, 2)), **options)
    cache_of_slots = KVCache(engine.info.num_slots, CPU)
    if drafter == "model":
        give_drafter(engine, ModelDrafter("tiny", model(family), cache_of_slots, Feeding.OWN_CACHE))
        engine._scheduler._feeding = Feeding.OWN_CACHE
    elif drafter == "ngram":
        give_drafter(engine, TextDrafter(61, CPU, TextCache(min_tokens=1)))
    elif drafter == "early exit":
        give_drafter(
            engine, early_exit_drafter(engine.target.model, engine.target.cache, Lens(2, torch.eye(32), torch.zeros(32), {}))
        )
    return engine


def under(adapter: str | None, request: Request) -> Request:
    return replace(request, adapter=adapter, request_id=f"{adapter} {request.request_id}")


@cache
def merged_module(adapter: str | None, family: str = "llama"):
    return merged(None if adapter is None else random_adapter(adapter, family, NAMES.index(adapter)), family)


@torch.inference_mode()
def merged_text(adapter: str | None, family: str = "llama", prompt: list[int] = PROMPT, num_tokens: int = 12) -> list[int]:
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "max_new_tokens": num_tokens, "eos_token_id": None, "pad_token_id": 0}
    out = merged_module(adapter, family).generate(ids, attention_mask=torch.ones_like(ids), **options)
    return out[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def texts(engine: Engine, family: str = "llama") -> dict[str | None, bool]:
    """Return for each adapter whether two requests under it, at once and after one another, have the merged model's text."""
    found = {}
    for turn in range(2):
        requests = [under(name, greedy(f"{turn}", PROMPT)) for name in NAMES]
        found.update(run(engine, requests).texts())
    return {
        name: all(ids == merged_text(name, family) for key, ids in found.items() if key.split()[0] == str(name)) for name in NAMES
    }


@pytest.mark.parametrize("linears", LINEARS)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_texts_equal_merged_models(family, drafter, linears):
    assert len({tuple(merged_text(name, family)) for name in NAMES}) == 3
    assert texts(engine_of(drafter, family, linears), family) == dict.fromkeys(NAMES, True)


@pytest.mark.parametrize("linears", LINEARS)
def test_logits_equal_merged_models_within_tolerance(linears):
    """The merged weights are rounded once more, so logits differ by float32's rounding: 1e-4 of the largest at most."""
    for name in NAMES:
        request = under(name, Request("r", tuple(PROMPT), replace(SAMPLING, num_prompt_logprobs=0)))
        events = run(engine_of("none", linears=linears), [request]).outcomes[request.request_id].events
        found = [one.logprob for event in events for one in event.prompt_logprobs]
        with torch.inference_mode():
            own = merged_module(name)(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
        expected = [float(own[place, token_id]) for place, token_id in enumerate(PROMPT[1:])]
        assert found == pytest.approx(expected, abs=1e-4 * max(map(abs, expected)))


def neighbours(rows: AdaptedRows) -> None:
    """Give each adapter's rows to its neighbour."""
    rows.by_adapter = dict(zip(rows.by_adapter, [*rows.by_adapter.values()][::-1], strict=True))


def no_rows(rows: AdaptedRows) -> None:
    rows.by_adapter = {}


def all_rows(rows: AdaptedRows) -> None:
    """Give all rows to each adapter."""
    rows.by_adapter = {name: torch.arange(rows.num_tokens) for name in rows.by_adapter}


@pytest.mark.parametrize("mutation", [neighbours, no_rows, all_rows])
def test_texts_differ_with_neighbours_adapter(mutation, monkeypatch):
    """The mutants of the choice of rows must fail the test of texts."""
    enter = AdaptedRows.of

    def of(rows, batch):
        context = enter(rows, batch)

        class Mutated:
            def __enter__(self):
                context.__enter__()
                mutation(rows)

            def __exit__(self, *error):
                context.__exit__(*error)

        return Mutated()

    monkeypatch.setattr(AdaptedRows, "of", of)
    assert not all(texts(engine_of("none")).values())


@pytest.mark.parametrize("linears", LINEARS)
def test_adapters_do_not_share_prefixes(linears, monkeypatch):
    """Keys of a prompt depend on the adapter: a prefix cached under another one would change the text."""
    engine = engine_of("none", linears=linears)
    for name in (*NAMES, *NAMES):
        request = under(name, greedy("r", PROMPT))
        session = run(engine, [request])
        assert session.outcomes[request.request_id].ids == merged_text(name)
    assert sum(one.num_prefix_hits for one in session.stats) == 32

    created = Sequence.__init__

    def shared(sequence, request, *rest):
        created(sequence, request, *rest)
        sequence.salt = (None, "")

    monkeypatch.setattr(Sequence, "__init__", shared)
    engine = engine_of("none", linears=linears)
    run(engine, [under("two", greedy("first", PROMPT))])
    assert run(engine, [under("one", greedy("r", PROMPT))]).outcomes["one r"].ids != merged_text("one")


def test_salt_cannot_name_an_adapter():
    """A salt that spells an adapter's name is still another prefix."""
    engine = engine_of("none")
    run(engine, [under("one", greedy("first", PROMPT))])
    for salt in ("one", "one\0", "('one', '')"):
        request = replace(greedy(salt, PROMPT), cache_salt=salt)
        assert run(engine, [request]).outcomes[salt].ids == merged_text(None)


@cache
def triples_of(adapter: str | None) -> dict[tuple[int, ...], float]:
    """Return the distribution of the first two tokens by the merged model."""

    def logits_after(texts: list[tuple[int, ...]]) -> Tensor:
        with torch.inference_mode():
            logits: Tensor = merged_module(adapter)(torch.tensor([[*PROMPT[:4], *text] for text in texts])).logits
        return logits[:, -1]

    return text_distribution(logits_after, 2, SAMPLING)


@pytest.mark.parametrize("linears", LINEARS)
@pytest.mark.parametrize(("verifier", "tree"), [("traversal", Expansion(1, 2, 1)), ("coupled", Expansion(0, 2, 2))])
def test_sampled_texts_follow_merged_distribution(verifier, tree, linears):
    """A batch of all adapters: each request's tokens have its own merged model's distribution, and no other's."""
    requests = [
        Request(
            f"{name} {index}",
            tuple(PROMPT[:4]),
            replace(SAMPLING, seed=7000 + 3 * index + NAMES.index(name)),
            Speculation(verifier=verifier, expansion=tree),
            adapter=name,
        )
        for index in range(600)
        for name in NAMES
    ]
    found = run(engine_of("model", linears=linears, config=WIDE), requests).texts()
    counts = {name: Counter(tuple(ids[:2]) for key, ids in found.items() if key.split()[0] == str(name)) for name in NAMES}
    assert all(z_of_counts(counts[name], triples_of(name)) < PASSES_BELOW for name in NAMES)
    assert z_of_counts(counts["one"], triples_of("two")) > FAILS_ABOVE
    assert z_of_counts(counts["two"], triples_of(None)) > FAILS_ABOVE


def test_resumed_request_keeps_its_adapter():
    """After a worker's death another engine continues under the same adapter."""
    text = merged_text("two")
    resumed = replace(under("two", greedy("r", PROMPT)), progress=Progress(tuple(text[:5])))
    assert run(engine_of("model"), [resumed]).outcomes["two r"].ids == text[5:]


@pytest.mark.parametrize("linears", LINEARS)
def test_teacher_forcing_runs_the_adapter(linears):
    """The background audit feeds a text under the adapter that generated it."""
    engine = engine_of("none", linears=linears)
    forcing = engine.forcing()
    forcing.start(KnownText(tuple(PROMPT), tuple(merged_text("one")), "one"))
    rows = []
    while forcing.is_running:
        if (logits_NV := forcing.step().logits_NV) is not None:
            rows += logits_NV.argmax(-1).tolist()
    assert rows == merged_text("one")


def test_unknown_adapter_is_refused():
    with pytest.raises(RequestRefused, match="no adapter 'three'"):
        engine_of("none").add(under("three", greedy("r", PROMPT)))


def test_stats_name_running_and_waiting_adapters():
    config = replace(WIDE, max_running=1, max_model_len=64)
    engine = engine_of("none", config=config)
    for name in NAMES:
        engine.add(under(name, greedy("r", PROMPT)))
    stats = []
    while engine.has_work:
        stats.append(engine.step().stats)
    assert (stats[0].running_adapters, stats[0].waiting_adapters) == ((), ("one", "two"))
    assert ("two",) in [one.running_adapters for one in stats]
    assert (stats[-1].running_adapters, stats[-1].waiting_adapters) == ((), ())


def test_bfloat16_rows_of_base_keep_their_bits():
    """The low-rank term of one row changes no bit of another's, in a narrow format as well."""
    target = adopt(tiny_module("llama").bfloat16(), CPU)
    plain = run(tiny_engine(target, None), [greedy("r", PROMPT)]).texts()
    target.add_adapters([random_adapter("one")])
    session = run(tiny_engine(target, None), [greedy("r", PROMPT), under("one", greedy("r", PROMPT))])
    assert session.outcomes["r"].ids == plain["r"]
    assert session.outcomes["one r"].ids != plain["r"]
