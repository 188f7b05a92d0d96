"""Limits of each API key: requests and tokens per minute, concurrent requests. A plain ASGI layer; accounts take the time as an
argument.
"""

import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.http.auth import key_digest_of, key_name_of
from server.http.errors import TooManyRequests

RATE_HEADERS = tuple(f"x-ratelimit-{what}-{of}" for of in ("requests", "tokens") for what in ("limit", "remaining", "reset"))
_ONE = 1.0 - 1e-9  # a client that waits for the reported time has this much left, by rounding
_RETRY_S = 1.0  # reported if a running request must end first: its end is unknown


class KeyCounter(Protocol):
    """Counts the requests and tokens of each key by its name: server.metrics.keys."""

    def count_request(self, key: str) -> None:
        """Count one request."""
        ...

    def count_tokens(self, key: str, num_prompt_tokens: int, num_generated_tokens: int) -> None:
        """Count tokens."""
        ...


@dataclass(frozen=True, slots=True)
class RateLimits:
    """The limits of each key; None is no limit."""

    max_per_minute: int | None = None
    max_concurrent: int | None = None
    max_tokens_per_minute: int | None = None


class Bucket:
    """A token bucket: it holds a minute's amount, is full at first and refills evenly. Times are of any monotonic clock.

    So `per_minute` may be taken at once, and in the long run at most `per_minute` a minute. It can be overdrawn: then it is empty
    until the deficit is refilled.
    """

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.per_minute = per_minute
        self._left = float(per_minute)
        self._at_s = now_s

    def fill(self, now_s: float) -> None:
        """Refill by the time since the last call."""
        self._left = min(self.per_minute, self._left + (now_s - self._at_s) * self.per_minute / 60)
        self._at_s = now_s

    def take(self, amount: int, now_s: float) -> None:
        """Take an amount, even if the bucket holds less."""
        self.fill(now_s)
        self._left -= amount

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until the bucket holds 1; 0 if it does."""
        self.fill(now_s)
        return 0.0 if self._left >= _ONE else (1 - self._left) * 60 / self.per_minute

    def headers(self, of: str, now_s: float) -> dict[str, str]:
        """Return OpenAI's headers: the limit, the rest of it, and the seconds until the bucket is full."""
        self.fill(now_s)
        full_in_s = (self.per_minute - self._left) * 60 / self.per_minute
        values = {"limit": self.per_minute, "remaining": max(0, int(self._left)), "reset": f"{full_in_s:.3f}s"}
        return {f"x-ratelimit-{what}-{of}": str(value) for what, value in values.items()}


class Account:
    """The recent requests and tokens of one key."""

    bucket = Bucket

    def __init__(self, limits: RateLimits, now_s: float) -> None:
        self._most_open = limits.max_concurrent
        self._num_open = 0
        self._requests = None if limits.max_per_minute is None else self.bucket(limits.max_per_minute, now_s)
        self._tokens = None if limits.max_tokens_per_minute is None else self.bucket(limits.max_tokens_per_minute, now_s)

    def enter(self, now_s: float) -> None:
        """Count a request that begins now, or raise TooManyRequests and count nothing."""
        if self._most_open is not None and self._num_open >= self._most_open:
            text = f"{self._most_open} requests of this key are being answered"
            raise TooManyRequests(text, "too_many_concurrent_requests", _RETRY_S)
        if self._requests is not None and (wait_s := self._requests.wait_s(now_s)):
            text = f"this key may make {self._requests.per_minute} requests a minute"
            raise TooManyRequests(text, "rate_limit_exceeded", wait_s)
        if self._tokens is not None and (wait_s := self._tokens.wait_s(now_s)):
            text = f"this key may use {self._tokens.per_minute} tokens a minute, of prompts and answers together"
            raise TooManyRequests(text, "token_rate_limit_exceeded", wait_s)
        if self._requests is not None:
            self._requests.take(1, now_s)
        self._num_open += 1

    def leave(self) -> None:
        """Count the end of a request."""
        self._num_open -= 1

    def spend(self, num_tokens: int, now_s: float) -> None:
        """Count tokens of a request. They never end a running request; the next request may be refused."""
        if self._tokens is not None:
            self._tokens.take(num_tokens, now_s)

    def headers(self, now_s: float) -> dict[str, str]:
        """Return the RATE_HEADERS of the limits that are set."""
        requests = {} if self._requests is None else self._requests.headers("requests", now_s)
        return requests | ({} if self._tokens is None else self._tokens.headers("tokens", now_s))


@dataclass(frozen=True, slots=True)
class Spender:
    """Counts the tokens of one key's requests, for its account and for /metrics."""

    name: str
    account: Account
    metrics: KeyCounter
    clock: Callable[[], float]

    def spend(self, num_prompt_tokens: int = 0, num_generated_tokens: int = 0) -> None:
        """Count tokens."""
        self.metrics.count_tokens(self.name, num_prompt_tokens, num_generated_tokens)
        self.account.spend(num_prompt_tokens + num_generated_tokens, self.clock())


current_spender: ContextVar[Spender | None] = ContextVar("current_spender", default=None)


class RateLimiter:
    """Runs after ApiKeyGate. Owns an account for each key, and one for all requests if there are no keys. Only POST counts."""

    def __init__(
        self,
        app: ASGIApp,
        limits: RateLimits,
        metrics: KeyCounter,
        on_refusal: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.app = app
        self._limits = limits
        self._metrics = metrics
        self._on_refusal = on_refusal
        self._clock = clock
        self._accounts: dict[bytes | None, Account] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        account, name = self._account_of(scope), key_name_of(scope)
        self._metrics.count_request(name)

        async def send_with_rates(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(account.headers(self._clock()))
            await send(message)

        try:
            account.enter(self._clock())
        except TooManyRequests as refusal:
            self._on_refusal(refusal.code or "")
            await refusal.response()(scope, receive, send_with_rates)
            return
        current_spender.set(Spender(name, account, self._metrics, self._clock))
        try:
            await self.app(scope, receive, send_with_rates)
        finally:
            account.leave()

    def _account_of(self, scope: Scope) -> Account:
        digest = key_digest_of(scope)
        if digest not in self._accounts:
            self._accounts[digest] = Account(self._limits, self._clock())
        return self._accounts[digest]
