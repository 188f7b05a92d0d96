"""Small real tokenizers, trained here in milliseconds: byte-level BPE and sentencepiece-like BPE with byte fallback."""

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "hello world, hello there",
    "stop here",
    "naïve café",
    "日本語 text",
    "😀 smile",
]

CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('system must come first') }}{% endif %}"
    "<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
TOOL_TEMPLATE = (  # Qwen's way to show tools, calls and what came of them
    "{% if tools %}<|start|>system\n<tools>{% for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}{{ '\n' }}</tools>"
    "<|end|>\n{% endif %}{% for m in messages %}<|start|>{{ m.role }}{% if m.content %}{{ '\n' + m.content }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{{ '\n' }}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|end|>{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{{ '\n' }}{% endif %}"
)
_MESSAGE_START = "<|start|>{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}{{ '\n' }}"
_CALLS = (
    "{% for call in m.tool_calls or [] %}{{ '\n' }}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}"
)
_TOOLS = (
    "{% if tools %}<|start|>system\n<tools>{% for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}</tools><|end|>\n"
    "{% endif %}"
)
THINK_TEMPLATES = {
    "qwen3": (  # the model opens the block; enable_thinking false writes an empty one; earlier reasoning is shown
        f"{_TOOLS}{{% for m in messages %}}{_MESSAGE_START}"
        "{% if m.role == 'assistant' and m.reasoning_content %}<think>\n{{ m.reasoning_content.strip('\n') }}\n</think>\n\n"
        f"{{% endif %}}{{{{ m.content or '' }}}}{_CALLS}<|end|>\n{{% endfor %}}"
        "{% if add_generation_prompt %}<|start|>assistant\n"
        "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
    ),
    "deepseek": (  # the template opens the block; earlier reasoning is left out
        f"{_TOOLS}{{% for m in messages %}}{_MESSAGE_START}"
        "{% if m.content and '</think>' in m.content %}{% set content = m.content.split('</think>')[-1] %}"
        f"{{% else %}}{{% set content = m.content or '' %}}{{% endif %}}{{{{ content }}}}{_CALLS}<|end|>\n{{% endfor %}}"
        "{% if add_generation_prompt %}<|start|>assistant\n<think>\n{% endif %}"
    ),
    "smollm3": (  # the mode is a default of the template, and a line of the system's message
        "{% if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif %}"
        "<|start|>system\nReasoning Mode: {{ '/think' if enable_thinking else '/no_think' }}<|end|>\n"
        f"{_TOOLS}{{% for m in messages %}}{_MESSAGE_START}{{{{ m.content or '' }}}}{_CALLS}<|end|>\n{{% endfor %}}"
        "{% if add_generation_prompt %}<|start|>assistant\n"
        "{% if not enable_thinking %}<think>\n\n</think>\n{% endif %}{% endif %}"
    ),
}
SPECIAL = ["<|end|>", "<|start|>", "<unk>"]


@cache
def byte_level() -> PreTrainedTokenizerFast:
    """Return byte-level BPE, as GPT-2, Llama 3, Qwen and SmolLM2 have it. Every byte is a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=CHAT_TEMPLATE)


@cache
def calling(special: bool | None = None) -> PreTrainedTokenizerFast:
    """Return byte-level BPE of a model that knows tools; the markup of calls is text, or tokens that are `special` or are not."""
    tokenizer = Tokenizer.from_str(byte_level().backend_tokenizer.to_str())
    if special is not None:
        tokenizer.add_tokens(
            [AddedToken(marker, special=special, normalized=False) for marker in ("<tool_call>", "</tool_call>")]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=TOOL_TEMPLATE)


@cache
def thinking(kind: str = "qwen3", special: bool | None = False) -> PreTrainedTokenizerFast:
    """Return byte-level BPE of a model that reasons and knows tools. Its markers are text, or tokens (`special` or not)."""
    tokenizer = Tokenizer.from_str(byte_level().backend_tokenizer.to_str())
    if special is not None:
        markers = ("<think>", "</think>", "<tool_call>", "</tool_call>")
        tokenizer.add_tokens([AddedToken(marker, special=special, normalized=False) for marker in markers])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=THINK_TEMPLATES[kind])


@cache
def surrounding() -> PreTrainedTokenizerFast:
    """Return byte-level BPE that puts a special token before and after a text, as Llama 3 (before) and T5 (after) have it."""
    tokenizer = Tokenizer.from_str(byte_level().backend_tokenizer.to_str())
    ends = [(token, tokenizer.token_to_id(token)) for token in ("<|start|>", "<|end|>")]
    tokenizer.post_processor = processors.TemplateProcessing(single="<|start|> $A <|end|>", special_tokens=ends)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=CHAT_TEMPLATE)


@cache
def byte_fallback() -> PreTrainedTokenizerFast:
    """Return BPE with `<0xNN>` tokens for what it does not know and a stripped first space, as Llama 2 and Gemma have it."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    commands = ["▁", *sorted({c for text in CORPUS[:3] for c in text if c != " "})]
    words = ["▁t", "▁th", "▁the", "he", "ll"]
    tokens = [*SPECIAL, *byte_tokens, *commands, *words]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("h", "e"), ("l", "l")]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", unk_token="<unk>")
