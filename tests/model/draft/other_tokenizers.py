"""Tiny models with different tokenizers: the drafter has the target's weights, as far as both have the same tokens."""

from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path

import torch
from llguidance import LLTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from engine.core.config import SchedulerConfig
from engine.core.policy import ExpansionPolicy, FixedExpansion
from engine.core.tree import Expansion
from engine.draft.drafter import Drafter
from engine.draft.models.token_map import TokenMap
from engine.draft.models.translating_drafter import TranslatingDrafter
from engine.engine import Engine
from engine.model.causal_lm import adopt
from engine.testing import tiny_engine, tiny_module
from tests.model.passes import CPU
from tests.tokenizers_for_tests import CORPUS, SPECIAL, byte_fallback, byte_level

# Emoji, Chinese characters, code, leading spaces, a special token, and an end inside a character.
TEXTS = {
    "emoji": "smile 😀 there".encode(),
    "cjk": "日本語 text 日本".encode(),
    "code": b"def the(x):\n    return hello\n",
    "spaces": b"   the quick",
    "cut": "hello 😀".encode()[:-2],
}


@cache
def other_byte_level() -> PreTrainedTokenizerFast:
    """Return byte-level BPE with fewer tokens, in another order, than `byte_level`, and without one of its special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|bos|>", *SPECIAL[1::-1]]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([*CORPUS[1:], "hello quick thesaurus"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


TOKENIZERS = {"byte level": byte_level, "other": other_byte_level, "byte fallback": byte_fallback}
PAIRS = [("byte level", "other"), ("other", "byte level"), ("byte level", "byte fallback"), ("byte fallback", "other")]


@cache
def vocabulary(name: str) -> LLTokenizer:
    return LLTokenizer(TOKENIZERS[name]().backend_tokenizer.to_str(), slices=[])


@cache
def tokens_of(target: str, draft: str) -> TokenMap:
    return TokenMap(vocabulary(target), vocabulary(draft))


@cache
def modules(target: str, draft: str, is_markov: bool = False) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return the models. Rows of tokens that both have are equal. A Markov chain reads its last token alone, with noise."""
    sizes = [len(TOKENIZERS[name]()) for name in (target, draft)]
    of_target, of_draft = (tiny_module(vocab_size=size) for size in sizes)
    shared = tokens_of(target, draft).draft_id_of
    ids, draft_ids = torch.tensor([*shared]), torch.tensor([*shared.values()])
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for one, other in zip(of_target.parameters(), of_draft.parameters(), strict=True):
            if one.shape == other.shape:
                other.copy_(one)
            else:
                other[draft_ids] = one[ids]
            if is_markov:
                other.add_(torch.randn(other.shape, generator=generator) * 0.05)
        for layer in (*of_target.model.layers, *of_draft.model.layers) if is_markov else ():
            layer.self_attn.o_proj.weight.zero_()
    return of_target, of_draft


def drafter_of(target: str, draft: str, is_markov: bool = False, num_slots: int = 2048) -> TranslatingDrafter:
    of_target, of_draft = modules(target, draft, is_markov)
    size = of_target.config.vocab_size
    return TranslatingDrafter("other", adopt(deepcopy(of_draft), CPU), num_slots, tokens_of(target, draft), size)


def engine_of(
    target: str,
    draft: str,
    expansion: Expansion | ExpansionPolicy,
    is_markov: bool = False,
    config: SchedulerConfig | None = None,
    drafter: Drafter | None = None,
) -> Engine:
    policy = FixedExpansion(expansion) if isinstance(expansion, Expansion) else expansion
    drafter = drafter or drafter_of(target, draft, is_markov)
    return tiny_engine(adopt(deepcopy(modules(target, draft, is_markov)[0]), CPU), drafter, policy, config=config)


def prompt_of(target: str, name: str) -> tuple[int, ...]:
    """Return a text's tokens after a special one."""
    special = vocabulary(target).tokenize_bytes(b"<|start|>")
    return (*special, *vocabulary(target).tokenize_bytes(TEXTS[name]))


def model_folder_of(folder: Path, module: PreTrainedModel, name: str) -> Path:
    """Write a model and its tokenizer; return the folder."""
    tokenizer = TOKENIZERS[name]()
    module.generation_config.eos_token_id = tokenizer.eos_token_id
    module.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@torch.inference_mode()
def greedy_text(module: PreTrainedModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Return what `generate` adds to the prompt."""
    ids = torch.tensor([list(prompt)])
    out = module.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens, eos_token_id=None, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()  # type: ignore[no-any-return]
