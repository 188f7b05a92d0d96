"""Small chat templates of each markup of tool calls, by the formats that the models' makers publish, and tokenizers with them."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from server.tool_calls.support import CallShape
from server.tool_calls.syntaxes import SYNTAXES
from tests.tokenizers_for_tests import byte_level

_JSON = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}'
_FIELDS = "{{ f.name }}({% for k in f.arguments %}{{ k }}={{ f.arguments[k] | tojson }}{{ ', ' if not loop.last }}{% endfor %})"
_CHECKED_ID = "{% if c.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
_V3 = "<｜tool▁call▁begin｜>{{ c.type }}<｜tool▁sep｜>{{ f.name }}\n```json\n{{ f.arguments | tojson }}\n```<｜tool▁call▁end｜>"
_V31 = "{{ '<｜tool▁call▁begin｜>' + f.name + '<｜tool▁sep｜>' + f.arguments + '<｜tool▁call▁end｜>' }}"
_XML = (
    "<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments | items %}<parameter={{ k }}>\n"
    "{{ v | tojson if v is mapping or (v is sequence and v is not string) else v | string }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>"
)
# What begins calls, what one call is, what is between two, what ends them.
CALLS: Mapping[str, tuple[str, str, str, str]] = {
    "hermes": ("", f"<tool_call>\n{_JSON}}}\n</tool_call>", "\n", ""),
    "qwen3_coder": ("", _XML, "\n", ""),
    "mistral": ("[TOOL_CALLS] [", _CHECKED_ID + _JSON + ', "id": "{{ c.id }}"}', ", ", "]"),
    "mistral_v11": ("", "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}", "", ""),
    "deepseek_v3": ("<｜tool▁calls▁begin｜>", _V3, "\n", "<｜tool▁calls▁end｜>"),
    "deepseek_v31": ("<｜tool▁calls▁begin｜>", _V31, "", "<｜tool▁calls▁end｜>"),
    "olmo3": ("<function_calls>\n", _FIELDS, "\n", "{{ '\n' }}</function_calls>"),
    "pythonic": ("[", _FIELDS, ", ", "]"),
    "llama3_json": ("", '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}', "; ", ""),
    "json": ("", _JSON + "}", "\n", ""),
}
assert CALLS.keys() == SYNTAXES.keys()


def template(markup: str) -> str:
    """Return a chat template that shows tools, calls and results."""
    begin, call, separator, end = CALLS[markup]
    # DeepSeek's templates add the content, which therefore cannot be missing.
    content = "{{ m.content + '' }}" if markup == "deepseek_v31" else "{{ m.content or '' }}"
    call = f"{{% set f = c.function %}}{call}{{{{ {separator!r} if not loop.last }}}}"
    return (
        "{% if tools %}<|start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|end|>\n{% endif %}"
        f"{{% for m in messages %}}<|start|>{{{{ m.role }}}}\n{content}{{% if m.tool_calls %}}{begin}"
        f"{{% for c in m.tool_calls %}}{call}{{% endfor %}}{end}"
        "{% endif %}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
    )


@cache
def tokenizer_of(markup: str, has_tokens: bool = True) -> PreTrainedTokenizerFast:
    """Return byte-level BPE with a markup's template; its markers are special tokens, or text."""
    tokenizer = Tokenizer.from_str(byte_level().backend_tokenizer.to_str())
    if has_tokens:
        tokenizer.add_tokens([AddedToken(marker, special=True, normalized=False) for marker in SYNTAXES[markup].markers])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=template(markup))


def rendered_calls(markup: str, calls: Sequence[tuple[str, Any]]) -> str:
    """Return an assistant's calls, given by name and arguments, as the template writes them."""
    shape = _SHAPES[markup]
    functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
    entries = [{"id": f"call{at:05}", "type": "function", "function": function} for at, function in enumerate(functions)]
    (message,) = shape.shaped([{"role": "assistant", "content": "", "tool_calls": entries}])
    text: str = byte_level().apply_chat_template([message], chat_template=template(markup), tokenize=False)
    return text.removeprefix("<|start|>assistant\n").removesuffix("<|end|>\n")


_SHAPES = {markup: CallShape(has_text_arguments=markup == "deepseek_v31") for markup in CALLS}
