"""Fill-in-the-middle: how families of models mark a prefix, a suffix and the middle to write, as their model cards describe it.

Knows the tokens of one tokenizer. Texts are encoded by a function that it is given.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

_SNIPPET = "\n\n--- snippet ---\n\n"  # llama.cpp's text before another file, for models without tokens for it

Ids = tuple[int, ...]
Encode = Callable[[str, bool], Ids]  # a text, and whether it begins one: some tokenizers put a space before it then
Files = Sequence[tuple[str, str]]  # name and text


@dataclass(frozen=True, slots=True)
class Repository:
    """The tokens before the name of a repository and before each file, and llama.cpp's names where a client gives none."""

    project: str
    project_name: str
    file: str
    file_name: str  # of the file with the hole


@dataclass(frozen=True, slots=True)
class Family:
    """The markers of one family of models, in the order prefix, suffix, middle; with `suffix_first` the suffix is the first.

    A middle ends at any of them and of `ends`, of which a tokenizer may lack some.
    """

    prefix: str
    suffix: str
    middle: str | None
    ends: tuple[str, ...] = ()
    suffix_first: bool = False
    repository: Repository | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        """The tokens without which there is no prompt."""
        return tuple(marker for marker in (self.prefix, self.suffix, self.middle) if marker is not None)


FAMILIES = (
    Family(  # Qwen2.5-Coder, CodeGemma
        *("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        ("<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|im_start|>", "<|im_end|>", "<|file_separator|>"),
        repository=Repository("<|repo_name|>", "myproject\n", "<|file_sep|>", "filename\n"),
    ),
    Family(  # StarCoder, StarCoder2, Granite, StableCode
        *("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        ("<|endoftext|>", "<fim_pad>", "<reponame>", "<filename>", "<gh_stars>", "<repo_name>", "<file_sep>"),
        repository=Repository("<repo_name>", "myproject", "<file_sep>", ""),
    ),
    Family("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ("<|endoftext|>", "<fim-pad>")),  # SantaCoder
    Family("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", ("<｜end▁of▁sentence｜>", "<|EOT|>")),  # DeepSeek-Coder
    Family("▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>",)),  # Code Llama
    Family("[PREFIX]", "[SUFFIX]", None, ("[MIDDLE]",), suffix_first=True),  # Codestral
)


class Infill:
    """Makes the prompts of one tokenizer, which begin with the ids `before`."""

    def __init__(self, family: Family, ids: Mapping[str, int], encode: Encode, before: Ids) -> None:
        self._family = family
        self._ids = ids
        self._encode = encode
        self._before = before
        self.end_ids = tuple(ids[token] for token in (*family.markers, *family.ends) if token in ids)
        has_files = family.repository and {family.repository.project, family.repository.file} <= ids.keys()
        self._repository = family.repository if has_files else None

    def prompt(self, prefix: str, suffix: str, adds_special_tokens: bool = True) -> Ids:
        """Return the prompt that the text between prefix and suffix continues."""
        before = self._before if adds_special_tokens else ()
        return (*before, *self._marked(self._encode(prefix, True), self._encode(suffix, False)))

    def prompt_of_files(self, prefix: str, suffix: str, files: Files, most: int) -> tuple[Ids, bool]:
        """Return a prompt of at most `most` tokens, after other files; and whether anything was left out to make it fit.

        The first files are left out first, then the beginning of the prefix and the end of the suffix, a quarter of the room.
        """
        head, here = self._before, Ids()
        if (repository := self._repository) is not None:
            head += (self._ids[repository.project], *self._encode(repository.project_name, False))
            here = (self._ids[repository.file], *self._encode(repository.file_name, False))
        before, after = self._encode(prefix, True), self._encode(suffix, False)
        room = max(0, most - len(head) - len(here) - len(self._family.markers))
        num_after = min(len(after), max(room // 4, room - len(before)))
        num_before = min(len(before), room - num_after)
        room -= num_before + num_after
        kept: list[Ids] = []
        for ids in reversed([self._file(name, text) for name, text in files]):
            if len(ids) > room:
                break
            kept.insert(0, ids)
            room -= len(ids)
        is_cut = num_before < len(before) or num_after < len(after) or len(kept) < len(files)
        marked = self._marked(before[len(before) - num_before :], after[:num_after])
        return (*head, *(token_id for ids in kept for token_id in ids), *here, *marked), is_cut

    def _file(self, name: str, text: str) -> Ids:
        if self._repository is None:
            return self._encode(_SNIPPET + text, False)
        return (self._ids[self._repository.file], *self._encode(f"{name}\n{text}", False))

    def _marked(self, before: Ids, after: Ids) -> Ids:
        parts = [(self._ids[self._family.prefix], *before), (self._ids[self._family.suffix], *after)]
        middle = () if self._family.middle is None else (self._ids[self._family.middle],)
        first, second = reversed(parts) if self._family.suffix_first else parts
        return (*first, *second, *middle)


def infill_of(added_tokens: Mapping[str, int], encode: Encode, before: Ids) -> Infill | None:
    """Return the prompts of the first family with all its markers among a tokenizer's added tokens, or None."""
    found = (family for family in FAMILIES if added_tokens.keys() >= {*family.markers})
    return next((Infill(family, added_tokens, encode, before) for family in found), None)
