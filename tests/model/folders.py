"""Model folders as transformers writes them: a tiny model and a tokenizer of words, each with its own small difference."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from engine.testing import tiny_module

WORDS = ("<pad>", "<s>", "</s>", *(f"w{index}" for index in range(3, 61)))
SPECIAL = ("<pad>", "<s>", "</s>")


def model_folder(
    folder: Path,
    module: PreTrainedModel | None = None,
    words: Sequence[str] = WORDS,
    special: Sequence[str] = SPECIAL,
    eos: int | list[int] | None = 2,
) -> Path:
    """Write a model (the tiny Llama of 61 rows by default) and a tokenizer of these words; return the folder."""
    module = module or tiny_module("llama")
    module.generation_config.eos_token_id = eos
    module.save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in special])
    template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", chat_template=template).save_pretrained(folder)
    return folder


def with_rows(num_rows: int, seed: int = 0, family: str = "llama") -> PreTrainedModel:
    """Return the tiny model with another number of rows: padded, or cut."""
    module = tiny_module(family, seed)
    module.resize_token_embeddings(num_rows, mean_resizing=False)
    return module
