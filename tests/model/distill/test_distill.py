"""Distillation: texts are what the target wrote, chains are trained as they are served, the loss has the right gradient."""

import dataclasses
import math
import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from engine.distill.chains import chain_states
from engine.distill.corpus import TEMPERATURES, Corpus, OtherTexts, Text, collect, generate_texts
from engine.distill.evaluation import evaluate
from engine.distill.loss import distillation_loss, teacher_probs
from engine.distill.make_head import is_held_out, shape_for
from engine.distill.prompts import PromptGrammar, draw_in_turn
from engine.distill.rows import coverage, frequent_tokens, require_plain_output
from engine.distill.trainer import Trainer, TrainingPlan, batched, made_ahead, sampled_starts
from engine.draft.models.head import DraftHead, HeadShape
from engine.model.causal_lm import adopt
from engine.testing import tiny_model, tiny_module
from engine.weights import UnsupportedModel
from server.cli.bench_prompts import read_prompts

LAYERS = (1, 3)
SHAPE = HeadShape(32, LAYERS, width=24, num_layers=2, num_heads=4, num_kv_heads=2, head_size=8, intermediate=40)
PLAN = TrainingPlan(num_epochs=2, tokens_per_update=120, tokens_per_pass=60, num_steps=3, num_warmup=2, checkpoint_every=3)


def tiny_head(seed: int = 0, vocab: Tensor | None = None) -> DraftHead:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return DraftHead(SHAPE, torch.arange(3, 61) if vocab is None else vocab)


def some_texts(count: int = 12) -> list[Text]:
    generator = torch.Generator().manual_seed(5)
    texts = []
    for index in range(count):
        length = 12 + index
        states = torch.randn(length - 1, 2, 32, generator=generator).bfloat16()
        texts.append(Text(index, torch.randint(0, 61, (length,), generator=generator).int(), 4, states))
    return texts


# ---- corpus


def test_sequences_and_states_are_the_targets_own(tmp_path: Path) -> None:
    model = tiny_model()
    prompts = [[5, 9, 11 + i] for i in range(9)]
    corpus = Corpus(tmp_path)
    collect(corpus, model, LAYERS, prompts, max_tokens=10, seed=7, batch=4, texts_per_shard=4)
    texts = sorted(corpus.texts(), key=lambda text: text.index)
    assert [text.index for text in texts] == list(range(9))
    assert [text.ids_T[:3].tolist() for text in texts] == prompts
    for text in texts:
        reference = _reference_states(text.ids_T[:-1])
        assert torch.allclose(text.states_TFD.float(), reference, rtol=0.01, atol=0.01)  # they are kept in bfloat16
    greedy = texts[2]  # the third temperature is 0
    expected = tiny_module().generate(
        torch.tensor([prompts[2]]), attention_mask=torch.ones(1, 3), max_new_tokens=10, do_sample=False, pad_token_id=0
    )
    assert greedy.ids_T.tolist() == expected[0].tolist()


def test_interrupted_collection_resumes(tmp_path: Path) -> None:
    model, prompts = tiny_model(), [[5, 9, 11 + i] for i in range(6)]
    whole, cut = Corpus(tmp_path / "whole"), Corpus(tmp_path / "cut")
    collect(whole, model, LAYERS, prompts, max_tokens=6, seed=1, batch=2, texts_per_shard=2)
    collect(cut, model, LAYERS, prompts, max_tokens=6, seed=1, batch=2, texts_per_shard=2)
    cut.shards[-1].unlink()
    collect(cut, model, LAYERS, prompts, max_tokens=6, seed=1, batch=2, texts_per_shard=2)
    by_index = [{text.index: text.ids_T.tolist() for text in corpus.texts()} for corpus in (whole, cut)]
    assert by_index[0] == by_index[1]
    assert len(by_index[0]) == 6


def test_folder_accepts_one_recipe_only(tmp_path: Path) -> None:
    corpus = Corpus(tmp_path / "texts")
    corpus.bind({"seed": "1", "precision": "bfloat16"})
    corpus.add(some_texts(2))
    corpus.bind({"seed": "1", "precision": "bfloat16"})
    with pytest.raises(OtherTexts, match="another seed;"):
        corpus.bind({"seed": "2", "precision": "bfloat16"})
    (tmp_path / "texts" / "made_with.json").unlink()
    with pytest.raises(OtherTexts, match="another seed, precision"):
        corpus.bind({"seed": "1", "precision": "bfloat16"})


def _reference_states(ids_T: Tensor) -> Tensor:
    out = tiny_module()(input_ids=ids_T[None].long(), output_hidden_states=True)
    return torch.stack([out.hidden_states[1][0], out.hidden_states[-1][0]], dim=1)


# ---- chains


def naive_chain(head: DraftHead, text: Text, embeddings_TD: Tensor, start: int, num_steps: int) -> list[Tensor]:
    """One chain token by token, with plain loops over what each position may see."""
    states = text.states_TFD.float()
    features = torch.cat([torch.zeros(1, SHAPE.width), head.features(states)])[:-1]
    inputs = list(head.tokens(embeddings_TD))
    caches: list[list[tuple[Tensor, Tensor]]] = [[] for _ in head.decoder]
    state = torch.zeros(SHAPE.width)
    found: list[Tensor] = []
    for position in range(start + num_steps):
        state = features[position] if position <= start else found[-1]
        for layer, cache in zip(head.decoder, caches, strict=True):
            query, key, value = layer.projected(state, inputs[position], *head.shape.rotary(torch.tensor(position)))
            cache.append((key, value))
            heads = []
            for index in range(SHAPE.num_heads):
                group = index // (SHAPE.num_heads // SHAPE.num_kv_heads)
                scores = torch.stack([query[index] @ key[group] for key, _ in cache]) * SHAPE.head_size**-0.5
                weights = scores.softmax(0)
                heads.append(sum(w * value[group] for w, (_, value) in zip(weights, cache, strict=True)))
            state = layer.after_attention(state, torch.cat(heads))
        if position >= start:
            found.append(state)
    return found


def test_parallel_chains_equal_single_chains() -> None:
    head, texts = tiny_head(), some_texts(3)
    embeddings_VD = torch.randn(61, 32, generator=torch.Generator().manual_seed(1))
    batch = batched(texts, torch.device("cpu"))
    starts_BC = torch.tensor([[3, 6], [5, 1], [8, 4]])
    with torch.inference_mode():
        steps = list(chain_states(head, batch.states_BTFD.float(), embeddings_VD[batch.ids_BT], starts_BC, 3))
        for row, text in enumerate(texts):
            for column, start in enumerate(starts_BC[row].tolist()):
                naive = naive_chain(head, text, embeddings_VD[text.ids_T[:-1].long()], start, 3)
                parallel = [steps[0][row, start], *(state[row, column] for state in steps[1:])]
                for one, other in zip(naive, parallel, strict=True):
                    assert torch.allclose(one, other, atol=1e-5)


def test_chains_start_where_all_positions_count() -> None:
    counts_BT = torch.zeros(2, 20, dtype=torch.bool)
    counts_BT[0, 4:15] = True
    counts_BT[1, 10:13] = True  # too short for a chain of four
    starts_BC, is_start_BC = sampled_starts(counts_BT, 0.5, 4, torch.Generator().manual_seed(0))
    assert not is_start_BC[1].any()
    assert all(4 <= start <= 11 for start in starts_BC[0][is_start_BC[0]].tolist())
    assert int(is_start_BC[0].sum()) == 4


# ---- loss


@pytest.mark.parametrize("weight", [0.0, 0.4, 1.0])
def test_loss_gradient_equals_autograd(weight: float) -> None:
    generator = torch.Generator().manual_seed(2)
    rows_MD = torch.randn(13, 6, generator=generator)
    probs_NM = teacher_probs(torch.randn(7, 6, generator=generator), rows_MD).float()
    predicted = torch.randn(7, 6, generator=generator, requires_grad=True)
    log_q = (predicted @ rows_MD.T).log_softmax(-1)
    plain = (1 - weight) * -(probs_NM * log_q).sum(-1) + weight * (1 - torch.minimum(probs_NM, log_q.exp()).sum(-1))
    (expected,) = torch.autograd.grad(plain.mean(), predicted)
    loss = distillation_loss(predicted, probs_NM, rows_MD, weight)
    (found,) = torch.autograd.grad(loss, predicted)
    assert torch.allclose(loss, plain.mean(), atol=2e-2)  # the teacher's probabilities are bfloat16 and sum to about 1
    assert torch.allclose(found, expected, atol=1e-3)


def test_a_shard_never_takes_anothers_place(tmp_path: Path) -> None:
    corpus = Corpus(tmp_path)
    for text in some_texts()[:3]:
        corpus.add([text])
    corpus.shards[0].unlink()
    corpus.add(some_texts()[3:4])
    assert [path.stem for path in corpus.shards] == ["shard-00001", "shard-00002", "shard-00003"]
    assert len(corpus.indices()) == 3


# ---- training


def trained(tmp_path: Path, name: str, plan: TrainingPlan = PLAN) -> Trainer:
    model, head = tiny_model(), tiny_head()
    output_VD = model.module.lm_head.weight
    trainer = Trainer(head, model.module.get_input_embeddings().weight, output_VD[head.vocab_M.long()], plan, tmp_path / name)
    (tmp_path / name).mkdir(exist_ok=True)
    trainer.run(some_texts())
    return trainer


def test_training_lowers_the_loss(tmp_path: Path) -> None:
    curve = trained(tmp_path, "a.pt", dataclasses.replace(PLAN, num_epochs=12, matrix_rate=0.06)).curve
    num_passes = len(curve) // 12  # of one epoch
    losses = [sum(point["loss"] for point in part) for part in (curve[:num_passes], curve[-num_passes:])]
    overlaps = [sum(point["overlap"] for point in part) for part in (curve[:num_passes], curve[-num_passes:])]
    assert losses[1] < 0.93 * losses[0], losses
    assert overlaps[1] > 1.2 * overlaps[0], overlaps


class Counting:
    """A method that counts its calls."""

    def __init__(self, method) -> None:
        self._method, self.num_calls = method, 0

    def __get__(self, trainer, kind):
        def counted(*args):
            self.num_calls += 1
            return self._method(trainer, *args)

        return counted


def test_interrupted_training_equals_uninterrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = trained(tmp_path, "whole.pt")
    count = 0
    original = Trainer._update

    def failing(self: Trainer, *args) -> dict[str, float]:
        nonlocal count
        count += 1
        if count == 5:
            raise KeyboardInterrupt
        return original(self, *args)

    monkeypatch.setattr(Trainer, "_update", failing)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path, "cut.pt")
    monkeypatch.setattr(Trainer, "_update", counting := Counting(original))
    resumed = trained(tmp_path, "cut.pt")
    assert counting.num_calls == len(whole.curve) - 3  # what was done before the last checkpoint is not done again
    assert len(resumed.curve) == len(whole.curve)
    for one, other in zip(whole.head.parameters(), resumed.head.parameters(), strict=True):
        assert torch.equal(one, other)


def test_another_plan_restarts_and_keeps_old_checkpoint(tmp_path: Path) -> None:
    num_updates = len(trained(tmp_path, "work").curve)
    (first,) = (tmp_path / "work").iterdir()
    longer = trained(tmp_path, "work", dataclasses.replace(PLAN, num_epochs=3))
    assert len(longer.curve) > num_updates
    assert first in set((tmp_path / "work").iterdir())
    alone = trained(tmp_path, "alone", dataclasses.replace(PLAN, num_epochs=3))
    for one, other in zip(longer.head.parameters(), alone.head.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_head_learns_from_any_target_format(tmp_path: Path, precision: str) -> None:
    model, head = tiny_model(), tiny_head()
    model.module.to(torch.bfloat16)
    embeddings_VD, rows_MD = model.module.get_input_embeddings().weight, model.module.lm_head.weight[head.vocab_M.long()]
    trainer = Trainer(head, embeddings_VD, rows_MD, dataclasses.replace(PLAN, precision=precision), tmp_path)
    trainer.run(some_texts())
    assert all(math.isfinite(point["loss"]) and point["norm"] > 0.0 for point in trainer.curve)


@pytest.mark.parametrize("other", ["head", "texts", "vocabulary"])
def test_changed_head_or_data_restarts_training(other: str, tmp_path: Path, monkeypatch) -> None:
    """A head to go on with has the sizes and the vocabulary of the first by its nature."""
    learnt = trained(tmp_path, "work").head
    model = tiny_model()
    head = {"head": learnt, "texts": tiny_head(), "vocabulary": tiny_head(vocab=torch.arange(2, 60))}[other]
    parts = model.module.get_input_embeddings().weight, model.module.lm_head.weight[head.vocab_M.long()]
    monkeypatch.setattr("torch.load", None)  # nothing is gone on with
    Trainer(head, *parts, PLAN, tmp_path / "work").run(some_texts()[:: -1 if other == "texts" else 1])


@pytest.mark.parametrize("layers", [(1, 2), (3, 1), (1, 1, 3)])
def test_last_feature_is_the_output_head_input(layers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must ascend"):
        shape_for(tiny_model(), 192, 1, 64, layers)


def test_a_head_survives_its_file(tmp_path: Path) -> None:
    head = tiny_head()
    head.save(tmp_path / "head.safetensors", {"target": "tiny"})
    loaded, recipe = DraftHead.load(tmp_path / "head.safetensors")
    assert recipe == {"target": "tiny"}
    assert loaded.shape == SHAPE
    for one, other in zip(head.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(one.bfloat16().float(), other)


@pytest.mark.parametrize("lost", ["widen.weight", "vocab_M"])
def test_a_damaged_head_is_refused_in_words(tmp_path: Path, lost: str) -> None:
    path = tmp_path / "head.safetensors"
    tiny_head().save(path, {"target": "tiny"})
    with safe_open(path, framework="pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys() if name != lost}, file.metadata()  # noqa: SIM118
    save_file(tensors, path, metadata=metadata)
    with pytest.raises(ValueError, match="damaged draft head"):
        DraftHead.load(path)


def test_sequences_shorter_than_chain_give_no_report() -> None:
    assert evaluate(tiny_head(), torch.randn(61, 32), torch.randn(61, 32), some_texts(2), num_steps=30) == []


def test_evaluation_is_perfect_where_head_equals_target() -> None:
    """A head of zeros gives uniform logits, and so does a target without output."""
    head = tiny_head(vocab=torch.arange(61))
    output_VD = torch.zeros(61, 32)
    reports = evaluate(head, torch.randn(61, 32), output_VD, some_texts(), num_steps=3)
    assert [round(report.overlap, 5) for report in reports] == [1.0, 1.0, 1.0]
    assert reports[0].num_positions == reports[2].num_positions > 0


def test_batched_evaluation_equals_single_evaluation() -> None:
    """All positions of all of them count, in texts of any length."""
    head, embeddings, output = tiny_head(), torch.randn(61, 32), torch.randn(61, 32)
    texts = some_texts(9)
    together = evaluate(head, embeddings, output, texts, num_steps=3, share=1.0)
    alone = [evaluate(head, embeddings, output, [text], num_steps=3, share=1.0) for text in texts]
    for depth, report in enumerate(together):
        counts = [reports[depth].num_positions for reports in alone]
        assert report.num_positions == sum(counts)
        for figure in ("overlap", "overlap_07", "agreement"):
            mean = sum(getattr(one[depth], figure) * count for one, count in zip(alone, counts, strict=True)) / sum(counts)
            assert getattr(report, figure) == pytest.approx(mean, abs=1e-5)


def test_prefetched_items_keep_order_and_errors() -> None:
    def parts():
        yield from range(5)
        raise ValueError("no more")

    ahead = made_ahead(parts())
    assert [next(ahead) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="no more"):
        next(ahead)
    assert [*made_ahead(iter("abc"))] == ["a", "b", "c"]


def test_frequent_tokens_carry_the_mass() -> None:
    model = tiny_model()
    texts = some_texts()
    few, everything = (frequent_tokens(model, texts, count) for count in (10, 1000))
    carried, all_carried = (coverage(model, texts, ids) for ids in (few, everything))
    assert few.tolist() == sorted(few.tolist())
    assert len(few) == 10
    assert len(everything) == 61
    assert coverage(model, texts, torch.arange(10)) < carried < all_carried == pytest.approx(1.0, abs=1e-3)


def test_known_tokens_stay_frequent_tokens_are_added() -> None:
    """Frequencies are those of all answers, not of the first ones."""
    model, texts = tiny_model(), some_texts()
    likeliest = frequent_tokens(model, texts, 20)
    known_M = torch.tensor([token_id for token_id in range(61) if token_id not in likeliest][:5])
    more = frequent_tokens(model, texts, 12, known_M)
    assert len(more) == 12
    assert set(known_M.tolist()) < set(more.tolist())
    assert set(more.tolist()) - set(known_M.tolist()) == set(frequent_tokens(model, texts, 7).tolist())
    rare = int(known_M[0])
    often = [*texts, dataclasses.replace(texts[0], ids_T=torch.tensor([*texts[0].ids_T[: texts[0].num_prompt], *[rare] * 5000]))]
    assert frequent_tokens(model, often, 1).tolist() == [rare]


def test_target_with_extra_logit_steps_is_refused() -> None:
    module = tiny_module()
    require_plain_output(adopt(module, torch.device("cpu"), "packed"))
    assert len(list(generate_texts(tiny_model(), LAYERS, {0: [5]}, 3, 1, 1))) == 1
    module.lm_head = nn.Linear(32, 61)
    with pytest.raises(UnsupportedModel, match="a head cannot be made"):
        require_plain_output(adopt(module, torch.device("cpu")))


# ---- prompts


def test_grammar_prompts_differ_and_repeat_per_seed() -> None:
    grammar = PromptGrammar({"a": ["{x} and {x}", "{number}"], "b": ["{small}"]}, {"x": ["one", "two"]}, {"a": 3, "b": 1})
    drawn = grammar.draw(60, 1)
    assert drawn == grammar.draw(60, 1) != grammar.draw(60, 2)
    assert max(Counter(drawn).values()) == 1
    with pytest.raises(ValueError, match="fewer"):
        grammar.draw(4 + 950 + 11 + 1, 1)
    with pytest.raises(ValueError, match="lacks fillers"):
        PromptGrammar({"a": ["{y}"]}, {}, {"a": 1})


def test_grammars_alternate_and_more_prompts_extend_fewer() -> None:
    one, other = (PromptGrammar({"a": [f"{name} {{number}}"]}, {}, {"a": 1}) for name in "xy")
    drawn = draw_in_turn([one, other], 7, 3)
    assert [prompt[0] for prompt in drawn] == list("xxxxxxy")
    assert [prompt[0] for prompt in draw_in_turn([one, other], 20, 3)] == list("xxxxxxyyyyyyxxxxxxyy")
    assert drawn == draw_in_turn([one, other], 20, 3)[:7]
    assert drawn[:6] == one.draw(6, 3)


def test_each_grammar_is_answered_at_every_temperature() -> None:
    for count in (1, 2, 3):
        grammars = [PromptGrammar({"a": [f"{name} {{number}}"]}, {}, {"a": 1}) for name in "xyz"[:count]]
        drawn = draw_in_turn(grammars, 36, 3)
        for name in "xyz"[:count]:
            given = Counter(TEMPERATURES[index % len(TEMPERATURES)] for index, prompt in enumerate(drawn) if prompt[0] == name)
            assert given == {one: TEMPERATURES.count(one) * 36 // count // len(TEMPERATURES) for one in TEMPERATURES}


def test_prompt_is_in_all_trainings_or_none() -> None:
    def text(index: int, prompt: Tensor, answer: int) -> Text:
        return Text(
            index, torch.cat([prompt, torch.tensor([answer], dtype=torch.int32)]), len(prompt), torch.zeros(len(prompt), 1, 1)
        )

    prompts = torch.randint(0, 1000, (2000, 9), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    sides = [is_held_out(text(index, prompt, 3)) for index, prompt in enumerate(prompts)]
    assert sides == [is_held_out(text(index + 7, prompt, 5)) for index, prompt in enumerate(prompts)]
    assert sum(sides) == pytest.approx(100, abs=35)
    assert 20 < sum(sides[::2]) < 80


def test_weights_apply_to_kinds_of_a_grammar(tmp_path: Path) -> None:
    path = tmp_path / "grammar.yaml"
    path.write_text("weights: {a: 1, b: 1}\ntemplates: {a: ['a {number}'], b: ['b {number}']}\nfillers: {}\n")
    grammar = PromptGrammar.load(path, {"a": 0, "c": 5})
    assert grammar.kinds == {"a", "b"}
    assert {prompt[0] for prompt in grammar.draw(50, 1)} == {"b"}


GRAMMARS = sorted(path.stem for path in (Path(__file__).parents[3] / "configs/drafters").glob("prompts*.yaml"))


@pytest.mark.parametrize(
    "text",
    [
        "fillers: {}",
        "weights: {a: 1}\ntemplates: {a: [3]}\nfillers: {}",
        "weights: {a: 1}\ntemplates: {a: []}\nfillers: {}",
        "a: [",
        "",
    ],
)
def test_file_without_a_grammar_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "grammar.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"grammar\.yaml is no grammar: "):
        PromptGrammar.load(path)


@pytest.mark.parametrize("name", GRAMMARS)
def test_shipped_grammars_produce_no_benchmark_prompt(name) -> None:
    root = Path(__file__).parents[3]
    drawn = set(PromptGrammar.load(root / f"configs/drafters/{name}.yaml").draw(8000, random.Random(3).randrange(100)))
    held_out = read_prompts(root / "configs/bench_prompts.yaml", [], 1000)
    assert not drawn & {prompt for prompts in held_out.values() for prompt in prompts}
