"""Prompts of tools: one user message, by the model's chat template if it has one."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from server.text.chat_ids import chat_ids

TEMPLATE = "{% for message in messages %}user {{ message.content }} {% endfor %}{% if add_generation_prompt %}answer{% endif %}"


def tokenizer_with(template: str | None) -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: place for place, word in enumerate(["?", "user", "answer", "red", "sky"])}, "?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", chat_template=template)


@pytest.mark.parametrize(("template", "expected"), [(TEMPLATE, (1, 3, 4, 2)), (None, (3, 4)), ("", (3, 4))])
def test_base_model_gets_the_message_alone(template, expected):
    """`latebranch bench`, `audit` and `drafter` ended in a traceback for models without a chat template."""
    assert chat_ids(tokenizer_with(template), "red sky") == expected
