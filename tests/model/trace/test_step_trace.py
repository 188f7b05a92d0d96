"""Step traces of a request: the models' own probabilities, its tokens, its parts. Untraced requests get none."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from engine.core.enums import DraftSource
from engine.core.policy import FixedExpansion
from engine.core.row_trace import RowTrace
from engine.core.tree import Expansion, parse_expansion
from engine.core.types import Request, SamplingParams, Speculation
from engine.draft.trees import grow as growth
from engine.engine import Engine
from engine.model.causal_lm import CausalModel
from engine.testing import tiny_engine, tiny_module, tiny_pair
from engine.trace import tree_probs
from server.generation.step_trace import parts_of
from tests.model.driving import Session, greedy, run, sampled
from tests.model.engine.test_engine import LONG, engine_of

TREES = ["2.2.2", "heap.6", "greedy_sample.6", "beam.6"]
VERIFIERS = {"greedy_sample": "univer", "beam": "nss"}
NUM_TOKENS = 6


def traced(request: Request) -> Request:
    return replace(request, speculation=replace(request.speculation, is_traced=True))


def traced_requests(tree: str) -> list[Request]:
    """Greedy, coupled and sampled requests, with edits and truncation; all are traced."""
    verifier = VERIFIERS.get(tree.split(".")[0], "traversal")
    cut: dict[str, Any] = {"temperature": 0.7, "top_k": 9, "max_tokens": NUM_TOKENS}
    penalised: dict[str, Any] = {
        "repetition_penalty": 1.4,
        "frequency_penalty": 0.3,
        "logit_bias": ((7, 2.0),),
        "bad_words": ((11,),),
    }
    requests = [
        greedy("greedy", LONG, NUM_TOKENS),
        sampled("coupled", LONG, 3, **cut),
        sampled("drawn", LONG, 4, verifier=verifier, **cut),
        sampled("edited", LONG, 5, NUM_TOKENS, verifier, **penalised),
        Request("greedy and edited", tuple(LONG), SamplingParams(0.0, max_tokens=NUM_TOKENS, **penalised)),
    ]
    return [traced(request) for request in requests]


def pair_of() -> tuple[CausalModel, CausalModel]:
    return tiny_pair(noise=0.05)


def twin(model: CausalModel) -> PreTrainedModel:
    """Return the same model driven by transformers."""
    module = tiny_module()
    module.load_state_dict(model.module.state_dict())
    return module


@lru_cache(maxsize=100)
@torch.no_grad()
def own_logits(module: PreTrainedModel, text: tuple[int, ...]) -> torch.Tensor:
    logits: torch.Tensor = module(torch.tensor([text])).logits[0, -1].double()
    return logits


def own_probs(module: PreTrainedModel, text: Sequence[int], num_prompt: int, sampling: SamplingParams) -> torch.Tensor:
    """Return the next token's distribution, made by hand: edits, temperature (1 for a greedy request), top-k."""
    logits = own_logits(module, tuple(text)).clone()
    for token_id, bias in sampling.logit_bias:
        logits[token_id] += bias
    for token_id in set(text):
        logits[token_id] *= sampling.repetition_penalty if logits[token_id] < 0 else 1 / sampling.repetition_penalty
    for token_id in text[num_prompt:]:
        logits[token_id] -= sampling.frequency_penalty
    for word in sampling.bad_words:
        logits[word[0]] = -torch.inf
    if not sampling.is_greedy:
        logits = logits / sampling.temperature
        if sampling.top_k:
            logits[logits < logits.topk(sampling.top_k).values[-1]] = -torch.inf
    return logits.softmax(-1)


def run_pair(tree: str) -> tuple[Session, PreTrainedModel, PreTrainedModel]:
    target, draft = pair_of()
    engine = tiny_engine(target, draft, FixedExpansion(parse_expansion(tree)))
    return run(engine, traced_requests(tree)), twin(target), twin(draft)


def traces_of(session: Session, name: str) -> list[RowTrace]:
    return [event.trace for event in session.outcomes[name].events if event.trace is not None]


def check_distributions(session: Session, requests: Sequence[Request], target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Compare each reported probability with the models' own distributions after the node's path."""
    for request in requests:
        text = list(request.prompt_ids)
        num_prompt = len(text)
        for trace in traces_of(session, request.request_id):
            row, probs = trace.row, trace.row.probs
            tree = row.tree
            for node in range(1, tree.num_nodes):
                before = [*text, *(tree.token_ids[v] for v in tree.path(tree.parents[node])[1:])]
                for module, reported in ((target, probs.target), (draft, probs.draft)):
                    distribution = own_probs(module, before, num_prompt, request.sampling)
                    assert reported[node - 1] == pytest.approx(float(distribution[tree.token_ids[node]]), abs=2e-5)
            path = [*text, *(tree.token_ids[v] for v in row.path[1:])]
            assert row.extra_id is not None
            distribution = own_probs(target, path, num_prompt, request.sampling)
            assert probs.extra == pytest.approx(float(distribution[row.extra_id]), abs=2e-5)
            assert len(probs.draft) == len(probs.target) == len(row.sources) == tree.num_nodes - 1
            text.extend(row.emitted_ids)
        assert text[num_prompt:] == session.outcomes[request.request_id].ids


@pytest.mark.parametrize("tree", TREES)
def test_reported_probabilities_are_the_models(tree: str) -> None:
    session, target, draft = run_pair(tree)
    check_distributions(session, traced_requests(tree), target, draft)
    assert any(trace.row.tree.num_nodes > 3 for name in ("greedy", "coupled", "drawn") for trace in traces_of(session, name))


def of_the_node_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The distribution after a node, in place of its parent's."""
    made = tree_probs._tree_probs

    def mutant(row, tree, verdict, draft_probs, logits_NV):
        return made(row, tree, verdict, draft_probs, logits_NV.roll(1, 0))

    monkeypatch.setattr(tree_probs, "_tree_probs", mutant)


def unedited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.trace.tree_probs.edited_logits", lambda logits_NV, *_: logits_NV)


def unwarped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.trace.tree_probs.ranking_params", lambda _: SamplingParams())


def drafts_in_order_of_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forgets that a tree may leave offers out and takes others later."""
    monkeypatch.setattr(
        growth,
        "_draft_probs",
        lambda tree, growing: tuple(prob for one in growing.draft_probs.values() for prob in one.values())[: tree.num_nodes - 1],
    )


@pytest.mark.parametrize("mutant", [of_the_node_itself, unedited, unwarped, drafts_in_order_of_offers])
def test_probability_reports_detect(mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    tree = "heap.6"
    session, target, draft = run_pair(tree)
    with pytest.raises(AssertionError):
        check_distributions(session, traced_requests(tree), target, draft)


def test_untraced_requests_get_no_report() -> None:
    requests = [traced(greedy("traced", LONG)), greedy("does not", LONG), sampled("nor this", LONG, 5)]
    session = run(tiny_engine(*pair_of(), FixedExpansion(Expansion(2, 2, 2))), requests)
    has_trace = {name: [event.trace is not None for event in one.events] for name, one in session.outcomes.items()}
    assert all(has_trace.pop("traced"))
    assert not any(any(flags) for flags in has_trace.values())


def test_tracing_changes_no_token() -> None:
    def texts(make: Callable[[Request], Request]) -> dict[str, list[int]]:
        engine = tiny_engine(*pair_of(), FixedExpansion(Expansion(2, 2, 2)))
        return run(engine, [make(request) for request in (greedy("a", LONG), sampled("b", LONG, 5))]).texts()

    assert texts(traced) == texts(lambda request: request)


def test_step_reports_its_seconds_and_reason() -> None:
    session = run(tiny_engine(*pair_of()), [traced(greedy("r", LONG))])
    stats = {one.step: one for one in session.stats}
    for trace in traces_of(session, "r"):
        own = stats[trace.row.step]
        assert (trace.step_s, trace.reason) == (own.step_s, own.policy_reason)
        assert sum(trace.stage_s.values()) == pytest.approx(own.step_s)


def test_plain_decoding_is_reported() -> None:
    session = run(tiny_engine(*pair_of()), [replace(greedy("r", LONG), speculation=Speculation(False, is_traced=True))])
    assert {trace.row.tree.num_nodes for trace in traces_of(session, "r")} == {1}
    assert all(0.0 < (trace.row.probs.extra or 0.0) <= 1.0 for trace in traces_of(session, "r"))


def engine_with_cached_text() -> Engine:
    return engine_of("llama", "ngram", Expansion(3, 1, 0))


def test_parts_report_the_source_of_nodes() -> None:
    """A prediction is reported as one, earlier text as cached, and a model's tokens before the fork as trunk."""
    repeated_ids = run(engine_with_cached_text(), [greedy("plain", LONG)]).outcomes["plain"].ids
    predicted = replace(traced(greedy("predicted", LONG)), prediction_ids=tuple(repeated_ids))
    repeated = traced(greedy("repeated", [*LONG, *LONG, *LONG[:4]]))
    session = run(engine_with_cached_text(), [predicted, repeated])
    assert any("prediction" in parts_of(trace.row) for trace in traces_of(session, "predicted"))
    assert any("cached" in parts_of(trace.row) for trace in traces_of(session, "repeated"))


def test_the_trunk_ends_where_the_tree_forks() -> None:
    session, _, _ = run_pair("2.2.2")
    for trace in traces_of(session, "drawn"):
        tree, parts = trace.row.tree, parts_of(trace.row)
        is_alone = [all(len(tree.children[v]) == 1 for v in tree.path(node)[:-1]) for node in range(tree.num_nodes)]
        assert parts == ["root", *("trunk" if alone else "branch" for alone in is_alone[1:])]
        assert set(trace.row.sources) <= {DraftSource.MODEL}
    assert {"trunk", "branch"} <= {part for trace in traces_of(session, "drawn") for part in parts_of(trace.row)}
