"""Each sampling parameter with a value that changes the distribution of a model of three tokens."""

from dataclasses import dataclass

from engine.core.types import Grammar, GrammarKind, SamplingParams

LETTERS = "ab"  # the tokens before the end token
GRAMMATICAL = ("a", "aa", "ab")  # what the grammar below lets come
STOP_ID, END_ID = 1, 2  # what a request may stop at; the model's own end of a text
NUM_TOKENS = 3  # of a text: one more than the deepest tree has levels


@dataclass(frozen=True)
class Subject:
    """A line of the table: `sampling` is compared with `base`, which lacks the parameter, to show that the value matters."""

    name: str
    value: str
    sampling: SamplingParams
    base: SamplingParams


def _subject(name: str, beside: dict[str, object] | None = None, **values: object) -> Subject:
    """Return the subject of a field; `beside` are values without which it would mean nothing."""
    base: dict[str, object] = {"max_tokens": NUM_TOKENS, "ignore_eos": True, **(beside or {})}
    shown = ", ".join(
        f"{key} {_shown(value)}" if key != name else _shown(value) for key, value in (values | (beside or {})).items()
    )
    return Subject(name, shown, SamplingParams(**(base | values)), SamplingParams(**base))  # type: ignore[arg-type]


def _shown(value: object) -> str:
    if isinstance(value, Grammar):
        return f"{value.kind} {value.text}"
    return str(value).lower() if isinstance(value, bool) else str(value)


DISTRIBUTIONS = [
    _subject("temperature", temperature=0.6),
    _subject("top_p", top_p=0.8),
    _subject("top_k", top_k=2),
    _subject("min_p", min_p=0.5),
    _subject("typical_p", typical_p=0.7),
    _subject("presence_penalty", presence_penalty=1.25),
    _subject("frequency_penalty", frequency_penalty=-0.75),
    _subject("repetition_penalty", repetition_penalty=1.6),
    _subject("logit_bias", logit_bias=((0, 1.5), (2, -1.0))),
    _subject("allowed_token_ids", allowed_token_ids=(0, 2)),
    _subject("bad_words", bad_words=((1, 2), (0, 0, 1))),
    _subject("min_tokens", {"stop_token_ids": (STOP_ID,)}, min_tokens=1),
    _subject("stop_token_ids", stop_token_ids=(STOP_ID,)),
    _subject("ignore_eos", ignore_eos=False),
    _subject("max_tokens", max_tokens=2),
    _subject("grammar", {"ignore_eos": False}, grammar=Grammar(GrammarKind.REGEX, "a[ab]?")),
    _subject("seed", {"frequency_penalty": 0.75}, seed=7, top_p=0.8),
]
EVERYTHING = Subject(
    "all of these",
    "temperature, truncation, penalties, bias and masks together",
    SamplingParams(
        temperature=2.0,
        top_p=0.95,
        min_p=0.05,
        typical_p=0.99,
        presence_penalty=0.375,
        frequency_penalty=0.75,
        repetition_penalty=1.25,
        logit_bias=((0, 0.5),),
        bad_words=((0, 1),),
        min_tokens=1,
        max_tokens=NUM_TOKENS,
        stop_token_ids=(STOP_ID,),
    ),
    SamplingParams(max_tokens=NUM_TOKENS),
)
GREEDY = Subject(
    "temperature",
    "0, frequency_penalty 1.5",
    SamplingParams(temperature=0.0, frequency_penalty=1.5, max_tokens=NUM_TOKENS, ignore_eos=True),
    SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True),
)
NUMBERS = ("num_logprobs", "num_prompt_logprobs")
