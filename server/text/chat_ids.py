"""One user message as a model's prompt, for tools that load a tokenizer of their own."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def chat_ids(tokenizer: "PreTrainedTokenizerBase", message: str) -> tuple[int, ...]:
    """Return the ids of a conversation of one user message, up to where the assistant's text begins.

    A base model has no chat template: its prompt is the message.
    """
    if not tokenizer.chat_template:
        return tuple(tokenizer(message)["input_ids"])
    chat = [{"role": "user", "content": message}]
    return tuple(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))
