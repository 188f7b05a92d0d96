"""Time limits of a request, until the first token of each of its texts and in total; and the errors for exceeding them."""

from dataclasses import dataclass, replace

from engine.core.service import UNKNOWN_RETRY_S
from server.http.errors import ApiError, Overloaded

DEADLINE_EXCEEDED = "deadline_exceeded"
FIRST_TOKEN_LATE = "first_token_late"


class DeadlineExceeded(ApiError):
    """The time limit of a request is over. A retry would exceed it again, so a header advises against it."""

    status = 504

    def __init__(self, limit_s: float, is_requested: bool) -> None:
        text = f"the request took longer than {limit_s:g} s" + ("" if is_requested else ", the limit of this server")
        super().__init__(text, "timeout_s" if is_requested else None, DEADLINE_EXCEEDED, {"x-should-retry": "false"})


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Seconds from when a request is queued; None is no limit. `is_requested`: the request sets `total_s` itself."""

    first_token_s: float | None = None
    total_s: float | None = None
    is_requested: bool = False

    def with_request_limit(self, total_s: float | None) -> "TimeLimits":
        """Return the limits of a request that sets its own total limit, which can only be shorter."""
        if total_s is None or (self.total_s is not None and self.total_s <= total_s):
            return self
        return replace(self, total_s=total_s, is_requested=True)

    def deadline_s(self, began_s: float, has_begun: bool) -> float | None:
        """Return the deadline of a request that began at `began_s`; `has_begun` is whether each of its texts has a token."""
        limits_s = [limit_s for limit_s in (self.total_s, None if has_begun else self.first_token_s) if limit_s is not None]
        return began_s + min(limits_s) if limits_s else None

    def lateness(self, spent_s: float) -> ApiError:
        """Return the error of a request whose deadline has passed after `spent_s`."""
        if self.total_s is not None and spent_s >= self.total_s:
            return DeadlineExceeded(self.total_s, self.is_requested)
        text = f"no first token within {self.first_token_s:g} s"
        return Overloaded(text, FIRST_TOKEN_LATE, UNKNOWN_RETRY_S)
