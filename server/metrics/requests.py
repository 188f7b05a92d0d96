"""Metrics of requests as a client sees them: latencies, lengths, finish reasons. Each request has a RequestMeter.

The engine reports a sample's queue time with its first tokens. The rest of the time to the first token is prefill.
"""

import time
from collections.abc import Callable

from engine.core.types import ErrorCode, FinishReason, TokenEvent
from server.http.request_trace import SampleTimes
from server.http.time_limits import DEADLINE_EXCEEDED, FIRST_TOKEN_LATE
from server.metrics.constructors import (
    FIRST_TOKEN_BUCKETS,
    REQUEST_BUCKETS,
    SAMPLES_BUCKETS,
    STEP_TOKENS_BUCKETS,
    TOKEN_BUCKETS,
    Families,
    length_buckets,
)

_ERRORS = tuple(code.value for code in ErrorCode)
_LATENESS = (DEADLINE_EXCEEDED, FIRST_TOKEN_LATE)
_REJECTIONS = (
    *("engine_busy", "engine_unavailable", "engine_error"),
    *("rate_limit_exceeded", "token_rate_limit_exceeded", "too_many_concurrent_requests"),
)


class RequestMetrics:
    """The families; `meter` begins the measurement of one request."""

    def __init__(self, families: Families, max_model_len: int) -> None:
        self._add_latencies(families)
        self._add_lengths(families, length_buckets(max_model_len))
        ends = [reason.value for reason in FinishReason]
        self.success = families.counters("vllm:request_success", "Samples ended, by reason.", "finished_reason", ends)
        self.failures = families.counters(
            "latebranch_failed_requests", "Samples that ended with an error, by its code.", "code", [*_ERRORS, *_LATENESS]
        )
        self.corrupted = families.counter("vllm:corrupted_requests", "Samples ended by logits that were not finite.")
        self.rejections = families.counters(
            "latebranch_rejected_requests", "Requests that were not accepted.", "reason", list(_REJECTIONS)
        )

    def _add_latencies(self, families: Families) -> None:
        self.first_token_s = families.histogram(
            "vllm:time_to_first_token_seconds", "Arrival to first token.", FIRST_TOKEN_BUCKETS
        )
        self.inter_token_s = families.histogram(
            "vllm:inter_token_latency_seconds",
            "A step of a sample, which may produce several tokens. Steps that arrive together share the time before them.",
            TOKEN_BUCKETS,
        )
        self.per_token_s = families.histogram(
            "vllm:request_time_per_output_token_seconds", "Decode time over tokens after the first.", TOKEN_BUCKETS
        )
        self.e2e_s = families.histogram("vllm:e2e_request_latency_seconds", "Arrival to end.", REQUEST_BUCKETS)
        self.queue_s = families.histogram("vllm:request_queue_time_seconds", "Arrival to admission.", REQUEST_BUCKETS)
        self.prefill_s = families.histogram("vllm:request_prefill_time_seconds", "Admission to first token.", REQUEST_BUCKETS)
        self.decode_s = families.histogram("vllm:request_decode_time_seconds", "First token to last.", REQUEST_BUCKETS)
        self.inference_s = families.histogram("vllm:request_inference_time_seconds", "Admission to last token.", REQUEST_BUCKETS)

    def _add_lengths(self, families: Families, lengths: tuple[int, ...]) -> None:
        self.kept_tokens = families.counter("vllm:generation_tokens", "Tokens of answers.")
        self.prompt_tokens = families.histogram("vllm:request_prompt_tokens", "Prompt tokens of a sample.", lengths)
        self.generation_tokens = families.histogram("vllm:request_generation_tokens", "Tokens of a sample's answer.", lengths)
        self.max_generation_tokens = families.histogram(
            "vllm:request_max_num_generation_tokens", "Tokens of a request's longest answer.", lengths
        )
        self.params_max_tokens = families.histogram("vllm:request_params_max_tokens", "The max_tokens of a request.", lengths)
        self.params_n = families.histogram("vllm:request_params_n", "The n of a request.", SAMPLES_BUCKETS)
        self.step_tokens = families.histogram(
            "latebranch_step_tokens", "Block efficiency: tokens of one decoding step for one sample.", STEP_TOKENS_BUCKETS
        )

    def refuse(self, reason: str) -> None:
        """Count a request that was not accepted, and nothing else of it."""
        self.rejections(reason).inc()

    def meter(self, num_samples: int, max_tokens: int, clock: Callable[[], float] = time.monotonic) -> "RequestMeter":
        """Begin the measurement of a request that has just arrived."""
        return RequestMeter(self, num_samples, max_tokens, clock)


class SampleMeter:
    """Times of one sample. Its end is counted once."""

    def __init__(self, metrics: RequestMetrics, num_prompt_tokens: int, arrival_s: float, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._num_prompt_tokens = num_prompt_tokens
        self._clock = clock
        self._arrival_s = arrival_s
        self._queued_s = 0.0
        self._first_token_s: float | None = None
        self._last_token_s = arrival_s
        self.num_tokens = 0  # of the answer
        self.num_steps = 0  # that produced tokens
        self.finish: FinishReason | None = None

    @property
    def is_ended(self) -> bool:
        """Whether its end was counted."""
        return self.finish is not None

    def times(self) -> SampleTimes:
        """Return its times for a trace."""
        has_tokens = self._first_token_s is not None
        return SampleTimes(
            arrival_s=self._arrival_s,
            admitted_s=self._arrival_s + self._queued_s if has_tokens else None,
            first_token_s=self._first_token_s,
            last_token_s=self._last_token_s if has_tokens else None,
            num_prompt_tokens=self._num_prompt_tokens,
            num_tokens=self.num_tokens,
            num_steps=self.num_steps,
            finish=self.finish.value if self.finish else "",
        )

    def on_event(self, event: TokenEvent) -> None:
        """Record the time of an engine event, and count its error."""
        if event.token_ids:
            self._queued_s = event.queued_s or self._queued_s
            self._on_tokens(event)
        if event.error_code is not None:
            self._metrics.failures(event.error_code.value).inc()
            self._metrics.corrupted.inc(event.error_code is ErrorCode.LOGITS_NOT_FINITE)

    def _on_tokens(self, event: TokenEvent) -> None:
        now_s = max(self._last_token_s, self._clock() - event.delayed_s)
        is_decoding = self._first_token_s is not None or event.num_draft_tokens > 0  # else the last step of the prefill
        for _ in range(event.num_steps if is_decoding else 0):
            self._metrics.step_tokens.observe(len(event.token_ids) / event.num_steps)
        if self._first_token_s is None:
            self._first_token_s = now_s
            self._metrics.first_token_s.observe(now_s - self._arrival_s)
        else:
            for _ in range(event.num_steps):
                self._metrics.inter_token_s.observe((now_s - self._last_token_s) / event.num_steps)
        self._last_token_s = now_s
        self.num_steps += event.num_steps

    def keep(self, num_tokens: int) -> None:
        """Count the tokens of an event that became part of the answer and of its usage."""
        self.num_tokens += num_tokens
        self._metrics.kept_tokens.inc(num_tokens)

    def end(self, reason: FinishReason) -> None:
        """Count the end."""
        if self.is_ended:
            return
        self.finish = reason
        metrics = self._metrics
        metrics.success(reason.value).inc()
        metrics.e2e_s.observe(self._clock() - self._arrival_s)
        metrics.prompt_tokens.observe(self._num_prompt_tokens)
        metrics.generation_tokens.observe(self.num_tokens)
        if self._first_token_s is not None:
            self._end_phases(metrics, self._first_token_s)

    def _end_phases(self, metrics: RequestMetrics, first_token_s: float) -> None:
        admitted_s = self._arrival_s + self._queued_s
        decode_s = self._last_token_s - first_token_s
        metrics.queue_s.observe(self._queued_s)
        metrics.prefill_s.observe(first_token_s - admitted_s)
        metrics.decode_s.observe(decode_s)
        metrics.inference_s.observe(self._last_token_s - admitted_s)
        if self.num_tokens > 1:
            metrics.per_token_s.observe(decode_s / (self.num_tokens - 1))


class RequestMeter:
    """Measures one HTTP request: a SampleMeter for each sample. It is closed once, by `reject` or by `close`."""

    def __init__(self, metrics: RequestMetrics, num_samples: int, max_tokens: int, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._num_samples = num_samples
        self._max_tokens = max_tokens
        self._clock = clock
        self._arrival_s = clock()
        self._samples: list[SampleMeter] = []

    def sample(self, num_prompt_tokens: int) -> SampleMeter:
        """Return the meter of one more sample."""
        self._samples.append(SampleMeter(self._metrics, num_prompt_tokens, self._arrival_s, self._clock))
        return self._samples[-1]

    def reject(self, reason: str) -> None:
        """Count a request that the engine did not accept, and nothing else of it."""
        self._metrics.refuse(reason)

    def fail(self, code: str) -> None:
        """Count the samples that have not ended as failed."""
        for sample in self._samples:
            self._metrics.failures(code).inc(not sample.is_ended)

    def times(self) -> list[SampleTimes]:
        """Return the samples' times for a trace."""
        return [sample.times() for sample in self._samples]

    def close(self, unfinished: FinishReason) -> None:
        """End the unfinished samples with the given reason; record the values that need all samples."""
        for sample in self._samples:
            sample.end(unfinished)
        self._metrics.params_n.observe(self._num_samples)
        self._metrics.params_max_tokens.observe(self._max_tokens)
        self._metrics.max_generation_tokens.observe(max((sample.num_tokens for sample in self._samples), default=0))
