"""Metrics of the background audit, updated with the StepStats of steps that report audit results."""

from itertools import product

from engine.core.types import StepStats
from server.metrics.constructors import Families

# The names of engine.audit, which imports torch; a test compares them.
_CHECKS = ("greedy", "coupled", "sampled")
_OUTCOMES = ("match", "near_tie", "mismatch")
_BINS = tuple(map(str, range(20)))


class AuditMetrics:
    """Sums the results of the audit; all are zero while `audit_share` is 0."""

    def __init__(self, families: Families) -> None:
        self._tokens = families.counters_by(
            "latebranch_audit_tokens", "Tokens checked again by a plain pass, by check and outcome.", ("check", "outcome")
        )
        for check, outcome in product(_CHECKS, _OUTCOMES):
            self._tokens(check, outcome)  # present from the start, so that the first mismatch is an increase
        self._bins = families.counters(
            "latebranch_audit_pit_bins", "Sampled tokens by the bin of their transform; even if nothing is lost.", "bin", _BINS
        )
        self._p_value = families.gauge("latebranch_audit_p_value", "Chance of bins so uneven since the engine was started.")
        self._p_value.set(1.0)
        self._dropped = families.counter("latebranch_audit_dropped", "Chosen requests that found no place or no verdict.")
        self._passed = families.counter("latebranch_audit_pass_tokens", "Tokens fed to the target by the audit.")

    def on_step(self, stats: StepStats) -> None:
        """Add the audit results of a step."""
        if stats.audit is None:
            return
        for check, counts in stats.audit.outcomes.items():
            for outcome, count in counts.items():
                self._tokens(check, outcome).inc(count)
        for index, count in enumerate(stats.audit.pit_bins):
            self._bins(str(index)).inc(count)
        self._p_value.set(stats.audit.p_value)
        self._dropped.inc(stats.audit.num_dropped)
        self._passed.inc(stats.audit.num_pass_tokens)
