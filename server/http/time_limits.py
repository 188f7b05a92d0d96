"""How long a request may take, until the first token of each of its texts and in all; and the errors of those that are late."""

from dataclasses import dataclass, replace

from engine.core.service import UNKNOWN_RETRY_S
from server.http.errors import ApiError, Overloaded

DEADLINE_EXCEEDED = "deadline_exceeded"
FIRST_TOKEN_LATE = "first_token_late"


class DeadlineExceeded(ApiError):
    """The time that a request was given is over. Asking again would only take it again, and clients are told so."""

    status = 504

    def __init__(self, limit_s: float, is_wished: bool) -> None:
        text = f"the request took longer than {limit_s:g} s" + ("" if is_wished else ", the most that this server gives to one")
        super().__init__(text, "timeout_s" if is_wished else None, DEADLINE_EXCEEDED, {"x-should-retry": "false"})


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Seconds from the moment at which a request is queued; None is without limit. `is_wished`: it asked for `total_s` itself."""

    first_token_s: float | None = None
    total_s: float | None = None
    is_wished: bool = False

    def with_wish(self, total_s: float | None) -> "TimeLimits":
        """Return the limits of a request that wishes for one of its own: it can only be shorter."""
        if total_s is None or (self.total_s is not None and self.total_s <= total_s):
            return self
        return replace(self, total_s=total_s, is_wished=True)

    def deadline_s(self, began_s: float, has_begun: bool) -> float | None:
        """Return when a request that began then is late; `has_begun` says whether each of its texts has a token."""
        waits_for = (self.total_s, None if has_begun else self.first_token_s)
        return min((began_s + limit_s for limit_s in waits_for if limit_s is not None), default=None)

    def lateness(self, spent_s: float) -> ApiError:
        """Return the error of a request whose deadline has passed after so long."""
        if self.total_s is not None and spent_s >= self.total_s:
            return DeadlineExceeded(self.total_s, self.is_wished)
        text = f"no first token within {self.first_token_s:g} s"
        return Overloaded(text, FIRST_TOKEN_LATE, UNKNOWN_RETRY_S)
