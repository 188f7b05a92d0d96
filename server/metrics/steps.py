"""Metrics of engine steps: load, throughput, speculation, updated with the StepStats of each step."""

from collections.abc import Callable
from dataclasses import dataclass

from engine.core.config import BLOCK_TOKENS
from engine.core.service import EngineHealth, EngineState
from engine.core.types import STAGES, DraftSource, ModelInfo, StepStats
from server.metrics.constructors import ITERATION_BUCKETS, PHASE_BUCKETS, Families
from server.metrics.speedup import SpeedupOverPlain

_MAX_EXPANSION_LABELS = 64
_OTHER = "other"


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Requests and cache slots of an engine."""

    num_running: int = 0
    num_waiting: int = 0
    num_used_slots: int = 0
    num_slots: int = 0
    running_adapters: tuple[str, ...] = ()
    waiting_adapters: tuple[str, ...] = ()

    @property
    def cache_usage(self) -> float:
        """Share of the cache's slots in use."""
        return self.num_used_slots / max(1, self.num_slots)


class StepMetrics:
    """Sums the counts of steps. Ratios are left to PromQL, so that replicas can be summed first.

    The load is that of the living worker's last step. While the worker is dead or starting, the load is 0.
    """

    def __init__(self, families: Families, health: Callable[[], EngineHealth]) -> None:
        self._families = families
        self._health = health
        self._last: StepStats | None = None
        self._last_restarts = 0  # the number of engine restarts at the last step
        self._has_info = False
        self._expansion_labels: set[str] = set()
        self._add_load(families)
        self._add_speculation(families)

    def _add_load(self, families: Families) -> None:
        running = families.gauge("vllm:num_requests_running", "Requests that take part in steps.")
        running.set_function(lambda: self.load.num_running)
        waiting = families.gauge("vllm:num_requests_waiting", "Requests that wait to be admitted.")
        waiting.set_function(lambda: self.load.num_waiting)
        cache_usage = families.gauge("vllm:kv_cache_usage_perc", "Share of the cache's slots in use; 1 is full.")
        cache_usage.set_function(lambda: self.load.cache_usage)
        self._prompt_tokens = families.counter("vllm:prompt_tokens", "Prompt tokens processed.")
        self._prefix_queries = families.counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._prefix_hits = families.counter("vllm:prefix_cache_hits", "Prompt tokens found cached, and not fed.")
        self._preemptions = families.counter("vllm:num_preemptions", "Sequences that lost their cache slots and were put back.")
        self._iteration_tokens = families.histogram(
            "vllm:iteration_tokens_total", "Prompt and generated tokens of a step.", ITERATION_BUCKETS
        )

    def _add_speculation(self, families: Families) -> None:
        self._drafts = families.counter("vllm:spec_decode_num_drafts", "Trees verified: decoding rows that had drafts.")
        self._draft_tokens = families.counter(
            "vllm:spec_decode_num_draft_tokens", "Drafted tokens verified; a tree's are its nodes."
        )
        self._accepted_tokens = families.counter("vllm:spec_decode_num_accepted_tokens", "Drafted tokens accepted.")
        sources = [source.value for source in DraftSource]
        self._drafted_by_source = families.counters(
            "latebranch_drafted_tokens", "Drafted tokens verified, by their source.", "source", sources
        )
        self._accepted_by_source = families.counters(
            "latebranch_accepted_tokens", "Drafted tokens that left the engine, by their source.", "source", sources
        )
        self._accepted_per_position = families.counters(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Trees whose accepted path reached a depth (0 is the first).",
            "position",
        )
        self._row_steps = families.counter("latebranch_decoding_row_steps", "Sequences advanced, summed over steps.")
        self._target_tokens = families.counter(
            "latebranch_target_tokens", "Packed tokens through the target model, prompts included."
        )
        self._read_bytes = families.counter(
            "latebranch_target_bytes", "Bytes of weights and cached keys that the target's passes read at least."
        )
        self._operations = families.counter(
            "latebranch_target_operations", "Operations of the target's products: two for each weight and token."
        )
        self._peak_bytes = families.gauge(
            "latebranch_peak_bytes_per_second", "Bytes that the machine reads at most, measured when the engine started."
        )
        self._peak_operations = families.gauge(
            "latebranch_peak_operations_per_second", "Operations of the model's products at most, measured at the same time."
        )
        self._expansions = families.counters(
            "latebranch_expansions", "Decoding rows by the tree they got: trunk.branches.depth, or its name.", "expansion"
        )
        self._expected_tokens = families.counter(
            "latebranch_expected_tokens", "Sum of E[tau + 1 | tree] over the decoding rows whose verifier computes it."
        )
        self._expected_rows = families.counter(
            "latebranch_expected_rows", "Decoding rows whose verifier computes E[tau + 1 | tree]."
        )
        self._realised_tokens = families.counter(
            "latebranch_realised_tokens", "Accepted depth + 1 of those rows, before token limits."
        )
        self._decisions = families.counters("latebranch_policy_steps", "Steps by the reason for their expansions.", "reason")
        self._predicted_s = families.counter(
            "latebranch_predicted_seconds", "Seconds that the policy predicted, summed over steps with a prediction."
        )
        self._actual_s = families.counter("latebranch_foretold_seconds", "Seconds that those steps took.")
        self._plain_s = families.counter(
            "latebranch_predicted_plain_seconds", "Predicted seconds of plain decoding for the expected tokens of those steps."
        )
        self._speedup = SpeedupOverPlain()
        speedup = families.gauge(
            "latebranch_speedup_over_plain", "Measured tokens per second of decoding steps over those of plain decoding."
        )
        speedup.set_function(lambda: self._speedup.interval().estimate)
        lower = families.gauge("latebranch_speedup_over_plain_lower", "Lower bound of the 95 % interval of that speed-up.")
        lower.set_function(lambda: self._speedup.interval().lower)
        upper = families.gauge("latebranch_speedup_over_plain_upper", "Upper bound of the 95 % interval of that speed-up.")
        upper.set_function(lambda: self._speedup.interval().upper)
        self._steps = families.counter("latebranch_steps", "Engine steps.")
        self._phase_s = families.histograms(
            "latebranch_step_phase_seconds", f"Seconds of a step: {', '.join(STAGES)}.", "phase", PHASE_BUCKETS
        )
        self._step_s = families.histogram("latebranch_step_seconds", "Seconds of a whole step.", PHASE_BUCKETS)

    def on_model(self, model: ModelInfo, has_prefix_cache: bool) -> None:
        """Set the info metrics and the peaks once: a restarted engine has loaded the same model."""
        if self._has_info:
            return
        self._has_info = True
        if model.peaks is not None:
            self._peak_bytes.set(model.peaks.bytes_per_s)
            self._peak_operations.set(model.peaks.operations_per_s)
        cache = {
            "block_size": str(BLOCK_TOKENS),
            "num_gpu_blocks": str(model.num_slots // BLOCK_TOKENS),
            "cache_dtype": model.cache_dtype or model.dtype,
            "enable_prefix_caching": str(has_prefix_cache),
        }
        self._families.info("vllm:cache_config_info", "The key-value cache; a block is what prefixes are shared by.", cache)
        speculation = {"drafter": model.drafter, "verifier": model.verifier, "policy": model.policy}
        engine = {"device": model.device, "dtype": model.dtype, **speculation}
        self._families.info("latebranch_engine_info", "What the engine runs.", engine)

    def on_step(self, stats: StepStats) -> None:
        """Add one step."""
        self._last, self._last_restarts = stats, self._health().num_restarts
        if stats.audit is not None and stats.audit.is_pass:
            return  # a pass of the audit is not a step of any request
        self._prompt_tokens.inc(stats.num_prompt_tokens)
        self._prefix_queries.inc(stats.num_prefix_queries)
        self._prefix_hits.inc(stats.num_prefix_hits)
        self._preemptions.inc(stats.num_preemptions)
        for _ in range(stats.num_steps):
            self._iteration_tokens.observe((stats.num_prompt_tokens + stats.num_generated_tokens) / stats.num_steps)
        self._on_speculation(stats)
        self._on_policy(stats)
        self._on_seconds(stats)
        self._speedup.on_step(stats)

    @property
    def load(self) -> EngineLoad:
        """The load after the living worker's last step; zeros if there is no such step."""
        health, last = self._health(), self._last
        if last is None or health.state is not EngineState.READY or health.num_restarts != self._last_restarts:
            return EngineLoad()
        return EngineLoad(
            num_running=last.num_running,
            num_waiting=last.num_waiting,
            num_used_slots=last.num_used_slots,
            num_slots=last.num_slots,
            running_adapters=last.running_adapters,
            waiting_adapters=last.waiting_adapters,
        )

    def _on_speculation(self, stats: StepStats) -> None:
        self._drafts.inc(stats.num_drafts)
        self._draft_tokens.inc(stats.num_draft_tokens)
        self._accepted_tokens.inc(stats.num_accepted_tokens)
        for source, count in stats.drafted_by_source.items():
            self._drafted_by_source(source).inc(count)
        for source, count in stats.accepted_by_source.items():
            self._accepted_by_source(source).inc(count)
        for position, count in enumerate(stats.accepted_per_depth):
            self._accepted_per_position(str(position)).inc(count)
        self._row_steps.inc(stats.num_row_steps)
        self._target_tokens.inc(stats.num_target_tokens)
        self._read_bytes.inc(stats.num_read_bytes)
        self._operations.inc(stats.num_operations)
        self._expected_tokens.inc(stats.expected_tokens)
        self._expected_rows.inc(stats.num_expected_rows)
        self._realised_tokens.inc(stats.num_realised_tokens)
        for expansion, count in stats.expansions.items():
            self._expansions(self._bounded(expansion)).inc(stats.num_steps * count)

    def _on_policy(self, stats: StepStats) -> None:
        if stats.policy_reason:
            self._decisions(stats.policy_reason).inc(stats.num_steps)
        if stats.predicted_s is not None:
            self._predicted_s.inc(stats.predicted_s)
            self._plain_s.inc(stats.predicted_s * stats.predicted_speedup)
            self._actual_s.inc(stats.step_s - stats.policy_s)  # the prediction excludes the policy's own time

    def _on_seconds(self, stats: StepStats) -> None:
        self._steps.inc(stats.num_steps)
        for _ in range(stats.num_steps):
            self._step_s.observe(stats.step_s / stats.num_steps)
            for phase in STAGES:
                self._phase_s(phase).observe(getattr(stats, f"{phase}_s") / stats.num_steps)

    def _bounded(self, expansion: str) -> str:
        """Return the label of an expansion. Clients can request any shape, but the number of series is bounded."""
        if expansion not in self._expansion_labels:
            if len(self._expansion_labels) >= _MAX_EXPANSION_LABELS:
                return _OTHER
            self._expansion_labels.add(expansion)
        return expansion
