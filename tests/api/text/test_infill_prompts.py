"""Prompts of fill-in-the-middle: each family's as its model card describes it, whose markers no text can forge."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.text.codec import TextCodec
from server.text.infill import Infill
from tests.tokenizers_for_tests import INFILL, byte_fallback, byte_level, infilling

PROMPTS = {
    "qwen": "<|fim_prefix|>hello<|fim_suffix|> world<|fim_middle|>",
    "codegemma": "<|start|><|fim_prefix|>hello<|fim_suffix|> world<|fim_middle|>",
    "starcoder": "<fim_prefix>hello<fim_suffix> world<fim_middle>",
    "starcoder2": "<fim_prefix>hello<fim_suffix> world<fim_middle>",
    "santacoder": "<fim-prefix>hello<fim-suffix> world<fim-middle>",
    "deepseek": "<|start|><｜fim▁begin｜>hello<｜fim▁hole｜> world<｜fim▁end｜>",
    "codellama": "<|start|>▁<PRE>▁hello▁<SUF>▁world▁<MID>",
    "codestral": "<|start|>[SUFFIX]▁world[PREFIX]▁hello",
}


def _codec(family: str, special: bool = True) -> TextCodec:
    return TextCodec(infilling(family, special))


def _infill(codec: TextCodec) -> Infill:
    assert codec.infill is not None
    return codec.infill


def _spelled(codec: TextCodec, ids: tuple[int, ...]) -> str:
    """Return a prompt's tokens: as text, or as the tokenizer spells them if it puts a space before texts."""
    strings = codec.token_strings(ids)
    return "".join(strings) if any(token.startswith("▁") for token in strings) else codec.decode(ids, skips_special=False)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("family", INFILL)
def test_a_prompt_is_its_familys(family: str, special: bool):
    codec = _codec(family, special)
    ids = _infill(codec).prompt("hello", " world")
    assert _spelled(codec, ids) == PROMPTS[family]
    markers = [codec.token_strings([token_id])[0] for token_id in ids]
    assert [token for token in markers if token in INFILL[family]] == [
        token for token in sorted(INFILL[family], key=PROMPTS[family].find) if token in PROMPTS[family]
    ]
    without = _infill(codec).prompt("hello", " world", adds_special_tokens=False)
    assert _spelled(codec, without) == PROMPTS[family].removeprefix("<|start|>")


def test_a_suffix_gets_no_added_space():
    """The bug to avoid: sentencepiece puts a space before a text, so a suffix `(x)` became ` (x)`."""
    for family in ("codellama", "codestral"):
        codec = _codec(family)
        for suffix, spelled in (("hello", "hello"), (" hello", "▁hello"), ("", ""), ("\n", "<0x0A>")):
            ids = _infill(codec).prompt("hello", suffix)
            assert _spelled(codec, ids) == PROMPTS[family].replace("▁world", spelled)


@pytest.mark.parametrize("family", INFILL)
def test_a_middle_ends_at_the_familys_tokens(family: str):
    codec = _codec(family)
    ends = {*codec.token_strings(_infill(codec).end_ids)}
    assert ends == {*INFILL[family]}


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_other_tokenizers_have_no_prompt(make: Any):
    assert TextCodec(make()).infill is None


@pytest.mark.parametrize("missing", INFILL["qwen"][:3])
def test_no_prompt_without_each_marker(missing: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(INFILL, "partial", [token for token in INFILL["qwen"] if token != missing])
    assert _codec("partial").infill is None


FILES = [("a.py", "hello"), ("b.py", "the")]
OF_FILES = {
    "qwen": "<|repo_name|>myproject\n<|file_sep|>a.py\nhello<|file_sep|>b.py\nthe<|file_sep|>filename\n" + PROMPTS["qwen"],
    "starcoder2": "<repo_name>myproject<file_sep>a.py\nhello<file_sep>b.py\nthe<file_sep>" + PROMPTS["starcoder2"],
    "santacoder": "\n\n--- snippet ---\n\nhello\n\n--- snippet ---\n\nthe" + PROMPTS["santacoder"],
    "deepseek": PROMPTS["deepseek"].replace("<|start|>", "<|start|>\n\n--- snippet ---\n\nhello\n\n--- snippet ---\n\nthe"),
}


@pytest.mark.parametrize("family", OF_FILES)
def test_other_files_come_before_the_prefix(family: str):
    codec = _codec(family)
    ids, is_cut = _infill(codec).prompt_of_files("hello", " world", FILES, 400)
    assert (codec.decode(ids, skips_special=False), is_cut) == (OF_FILES[family], False)


LONG = "".join(map(str, range(40)))


def _check_cuts(codec: TextCodec, family: str) -> None:
    infill, prefix, suffix = _infill(codec), LONG, LONG[::-1]
    before, after = codec.encode_plain(prefix, True), codec.encode_plain(suffix, False)
    alone, whole = (infill.prompt_of_files(prefix, suffix, files, 10_000)[0] for files in ([], FILES))
    num_fixed = len(alone) - len(before) - len(after)
    prefix_id, suffix_id = infilling(family).convert_tokens_to_ids(INFILL[family][:2])
    for most in range(num_fixed, len(whole) + 1):
        ids, is_cut = infill.prompt_of_files(prefix, suffix, FILES, most)
        assert (len(ids) <= most, is_cut) == (True, most < len(whole))
        if most >= len(alone):
            assert ids[-len(before) - len(after) - 3 :] == alone[-len(before) - len(after) - 3 :]
            continue
        at, end = ids.index(prefix_id), ids.index(suffix_id)
        kept_before, kept_after = ids[at + 1 : end], ids[end + 1 : -1]
        assert (before[len(before) - len(kept_before) :], after[: len(kept_after)]) == (kept_before, kept_after)
        assert (len(ids), len(kept_after) >= min(len(after), (most - num_fixed) // 4)) == (most, True)
        assert len(kept_before) == len(before) or len(kept_after) == (most - num_fixed) // 4
    nearly_whole, _ = infill.prompt_of_files(prefix, suffix, FILES, len(whole) - 1)
    assert len(alone) < len(nearly_whole) < len(whole) - 1, "the last file is kept"


@pytest.mark.parametrize("family", ["qwen", "deepseek", "codellama"])
def test_a_long_prompt_is_cut_to_fit(family: str):
    """The first files are left out first; then the beginning of the prefix, and the end of the suffix down to a quarter."""
    _check_cuts(_codec(family), family)


def test_a_wrong_cut_is_detected(monkeypatch: pytest.MonkeyPatch):
    """The mutant keeps the beginning of the prefix."""
    codec = _codec("qwen")
    marked = Infill._marked
    before = codec.encode_plain(LONG, True)
    monkeypatch.setattr(Infill, "_marked", lambda self, kept, after: marked(self, before[: len(kept)], after))
    with pytest.raises(AssertionError):
        _check_cuts(codec, "qwen")


def _check_forging(codec: TextCodec, family: str, special: bool) -> None:
    tokenizer = infilling(family, special)
    controls = {*tokenizer.convert_tokens_to_ids([*INFILL[family], "<|start|>", "<|end|>"])}
    halves = [half for token in INFILL[family] for half in (token[:3], token[3:])]
    words = st.sampled_from([*INFILL[family], *halves, "<|start|>", "hello", " ", "日"])
    texts = st.lists(words, max_size=8).map("".join)

    @given(texts, texts)
    def holds(prefix: str, suffix: str) -> None:
        ids = _infill(codec).prompt(prefix, suffix)
        assert [i for i in ids if i in controls] == [i for i in _infill(codec).prompt("", "") if i in controls]
        assert codec.decode(ids, skips_special=False).replace("▁", " ").count("hello") == (prefix + suffix).count("hello")
        cuts = [at for at, i in enumerate(ids) if i in controls]
        pieces = [codec.decode(ids[start + 1 : end]) for start, end in pairwise([*cuts, len(ids)])]
        if family in ("qwen", "starcoder", "deepseek"):
            assert [piece for piece in pieces if piece] == [text for text in (prefix, suffix) if text]

    holds()


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("family", INFILL)
def test_texts_forge_no_marker(family: str, special: bool):
    """A text that spells out a marker is encoded as text, also if the tokenizer does not call the marker special (DeepSeek's)."""
    _check_forging(_codec(family, special), family, special)


def test_forged_markers_are_detected():
    codec = _codec("deepseek", False)
    codec._unmarked = None
    with pytest.raises(AssertionError):
        _check_forging(codec, "deepseek", False)
