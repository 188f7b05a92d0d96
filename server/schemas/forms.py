"""Objects of several forms, distinguished by their field `type`. An object of another type is refused by that field alone."""

from collections.abc import Callable
from typing import Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Tag

_TAG = "form-"  # begins the tags of unions, which error messages leave out
_OTHER = "other"


def form(kind: str) -> Tag:
    """Return the tag of the form of a type."""
    return Tag(_TAG + kind)


OTHER = form(_OTHER)


def by_type(*kinds: str, default: str | Callable[[Any], str] | None = None) -> Discriminator:
    """Return the function that finds the form of a value by its field `type`; `default` is the type of values without one."""

    def tag(value: Any) -> str:
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        if kind is None:
            kind = default(value) if callable(default) else default
        return _TAG + (kind if kind in kinds else _OTHER)

    return Discriminator(tag)


def refused_type(*kinds: str) -> AfterValidator:
    """Return the validator of a `type` that is none of `kinds`: it refuses every value."""

    def refuse(kind: object) -> object:
        raise ValueError(f"{str(kind)[:64]} is not supported by this server; accepted: {', '.join(kinds)}")

    return AfterValidator(refuse)


class OtherForm(BaseModel):
    """Base of an object whose type is not supported: only the type is reported."""

    model_config = ConfigDict(extra="ignore", strict=True)
