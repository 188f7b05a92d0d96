"""How much one API key may ask for: requests a minute, requests at once. A plain ASGI layer over accounts that know no clock."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.http.auth import key_digest_of
from server.http.errors import TooManyRequests

RATE_HEADERS = ("x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests")  # OpenAI's
_ONE = 1.0 - 1e-9  # request: whoever waits as long as told has so much left, by rounding
_AGAIN_S = 1.0  # when to ask again where nobody knows which running request ends first


@dataclass(frozen=True, slots=True)
class RateLimits:
    """What each key may ask for; None is without limit."""

    max_per_minute: int | None = None
    max_concurrent: int | None = None


class Account:
    """What one key has asked for lately. Times are seconds of any clock that never goes back.

    A token bucket: it holds a minute's requests, is full at first and fills evenly. So `max_per_minute` may come at once, and in
    the long run no more than so many a minute.
    """

    def __init__(self, limits: RateLimits, now_s: float) -> None:
        self._limits = limits
        self._num_open = 0
        self._left = float(limits.max_per_minute or 0)
        self._at_s = now_s

    def enter(self, now_s: float) -> None:
        """Count one request that begins now, or raise TooManyRequests and count nothing."""
        most_open, per_minute = self._limits.max_concurrent, self._limits.max_per_minute
        if most_open is not None and self._num_open >= most_open:
            raise TooManyRequests(
                f"{most_open} requests of this key are being answered", "too_many_concurrent_requests", _AGAIN_S
            )
        if per_minute is not None:
            self._fill(per_minute, now_s)
            if self._left < _ONE:
                wait_s = (1 - self._left) * 60 / per_minute
                raise TooManyRequests(f"this key may make {per_minute} requests a minute", "rate_limit_exceeded", wait_s)
            self._left -= 1
        self._num_open += 1

    def leave(self) -> None:
        """Note that a request that was counted has been answered."""
        self._num_open -= 1

    def headers(self, now_s: float) -> dict[str, str]:
        """Return RATE_HEADERS: the limit, what is left of it, and when it will be whole again."""
        per_minute = self._limits.max_per_minute
        if per_minute is None:
            return {}
        self._fill(per_minute, now_s)
        whole_again_s = (per_minute - self._left) * 60 / per_minute
        return dict(zip(RATE_HEADERS, (str(per_minute), str(int(self._left)), f"{whole_again_s:.3f}s"), strict=True))

    def _fill(self, per_minute: int, now_s: float) -> None:
        self._left = min(per_minute, self._left + (now_s - self._at_s) * per_minute / 60)
        self._at_s = now_s


class RateLimiter:
    """Stands behind the gate: an account for each key that opened it, one for all where there are no keys. Only POST counts."""

    def __init__(
        self, app: ASGIApp, limits: RateLimits, on_refusal: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.app = app
        self._limits = limits
        self._on_refusal = on_refusal
        self._clock = clock
        self._accounts: dict[bytes | None, Account] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        account = self._account_of(scope)

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
        try:
            await self.app(scope, receive, send_with_rates)
        finally:
            account.leave()

    def _account_of(self, scope: Scope) -> Account:
        digest = key_digest_of(scope)
        if digest not in self._accounts:
            self._accounts[digest] = Account(self._limits, self._clock())
        return self._accounts[digest]
