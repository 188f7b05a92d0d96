"""The plan of an audit: prompts, sampling settings, sample sizes and the error level."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from engine.core.tree import Expansion
from engine.core.types import SamplingParams, Speculation

_MIN_PREFIX_SAMPLES = 50


@dataclass(frozen=True, slots=True)
class Setting:
    """Sampling parameters, the verifier, and the tree of drafts (None: the policy chooses)."""

    sampling: SamplingParams
    verifier: str
    expansion: Expansion | None = None

    @property
    def name(self) -> str:
        """Short label."""
        return f"{self.sampling_name}, {self.verifier} {self.expansion or 'by policy'}"

    @property
    def sampling_name(self) -> str:
        """The sampling parameters that differ from their defaults, and the temperature."""
        default, names = SamplingParams(), ("top_p", "top_k", "min_p", *_PENALTIES)
        values = [(name, getattr(self.sampling, name)) for name in names]
        changed = "".join(f" {name} {value:g}" for name, value in values if value != getattr(default, name))
        return f"temperature {self.sampling.temperature:g}{changed}"

    @property
    def speculation(self) -> Speculation:
        """The speculation parameters of a request."""
        return Speculation(True, self.expansion, self.verifier)


_PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class AuditPlan:
    """An audit. Equal plans are reproducible; another `first_seed` gives an independent experiment.

    `num_samples` sequences of `max_tokens` tokens are drawn for each prompt and setting. Sequences of `num_choice_tokens` tokens
    are generated greedily and, with `num_seeds` seeds for each prompt and sampling setting, by the coupled rule. `alpha` is the
    probability that the distribution tests together reject a lossless engine. Raises ValueError for parameters that the
    reference does not support.
    """

    prompts: tuple[tuple[int, ...], ...]
    settings: tuple[Setting, ...]
    first_seed: int
    num_samples: int = 150
    max_tokens: int = 8
    num_choice_tokens: int = 48
    num_seeds: int = 2
    alpha: float = 1e-3
    min_prefix_samples: int = _MIN_PREFIX_SAMPLES

    def __post_init__(self) -> None:
        for sampling in (setting.sampling for setting in self.settings):
            has_masks = sampling.allowed_token_ids is not None or sampling.bad_words or sampling.min_tokens or sampling.grammar
            if sampling.logit_bias or has_masks or sampling.typical_p < 1.0:
                names = "logit_bias, allowed_token_ids, bad_words, min_tokens, grammar or typical_p"
                raise ValueError(f"the reference has no {names}, so they cannot be audited")

    def choice_settings(self) -> Iterator[Setting]:
        """Yield the settings with deterministic tokens: first greedy, then coupled."""
        expansions = list(dict.fromkeys(setting.expansion for setting in self.settings))
        samplings = list(dict.fromkeys(replace(setting.sampling, seed=None) for setting in self.settings))
        greedy = dict.fromkeys(replace(sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0) for sampling in samplings)
        for expansion in expansions:
            yield from (Setting(sampling, self.settings[0].verifier, expansion) for sampling in greedy)
        for expansion in expansions:
            yield from (Setting(sampling, "coupled", expansion) for sampling in samplings)
