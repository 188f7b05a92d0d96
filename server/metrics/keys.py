"""Requests and tokens of each API key, by its name in the settings; `-` for a key without a name, and for no key."""

from prometheus_client import CollectorRegistry, Counter


class KeyMetrics:
    """The families. Only names of the settings become labels, so clients cannot create new series."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "latebranch_key_requests", "POST requests by the name of their key.", ("key",), registry=registry
        )
        self._tokens = Counter(
            "latebranch_key_tokens",
            "Tokens of prompts and of answers, by the name of the request's key.",
            ("key", "kind"),
            registry=registry,
        )

    def count_request(self, key: str) -> None:
        """Count one request; refused requests count too."""
        self._requests.labels(key).inc()

    def count_tokens(self, key: str, num_prompt_tokens: int, num_generated_tokens: int) -> None:
        """Count tokens."""
        for kind, num in (("prompt", num_prompt_tokens), ("generation", num_generated_tokens)):
            if num:
                self._tokens.labels(key, kind).inc(num)
