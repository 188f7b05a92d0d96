"""The base of every request model: strict validation, and the refusal of unsupported fields.

Every model is strict and forbids unknown fields. A field of the OpenAI API that this server does not implement is declared
as `Neutral`: its neutral values change nothing and are accepted. Any other value is an error that names the field.
"""

import json
from collections.abc import Collection
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, StringConstraints
from pydantic_core import CoreSchema, PydanticCustomError
from pydantic_core.core_schema import no_info_after_validator_function

MAX_NAME_CHARS = 1024
MAX_DESCRIPTION_CHARS = 1 << 16  # agents describe a tool in pages of text
MAX_INTEGER = 2**31 - 1  # of any count or id, so that sums in the engine fit in 64 bits

Name = Annotated[str, StringConstraints(max_length=MAX_NAME_CHARS)]  # of a model, a user, a call
Description = Annotated[str, StringConstraints(max_length=MAX_DESCRIPTION_CHARS)]


class Neutral:
    """Marks a field that is accepted only with a value that changes nothing: null, or one of `values`. True is not 1 here."""

    def __init__(self, *values: object) -> None:
        self._values = (None, *values)

    def __get_pydantic_core_schema__(self, source: type, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Validate with `_check`."""
        return no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, _schema: CoreSchema, _handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Show the accepted values."""
        return {"enum": list(self._values)}

    def _check(self, value: object) -> object:
        if any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in self._values):
            return value
        raise ValueError(f"not supported by this server; accepted: {', '.join(map(json.dumps, self._values))}")


class Ignored:
    """Marks a field that is accepted and changes no text. An answer's header names it, unless its value is null or in `neutral`.

    A field that the chat template reads (`is_variable`) is not ignored.
    """

    def __init__(self, *neutral: object, is_variable: bool = False) -> None:
        self._neutral = (None, *neutral)
        self._is_variable = is_variable

    def is_dropped(self, name: str, value: object, variables: Collection[str]) -> bool:
        """Return whether the value would be expected to have an effect. `variables` are the chat template's."""
        return value not in self._neutral and not (self._is_variable and name in variables)


def misfit(param: str, reason: str) -> PydanticCustomError:
    """Return the error of a field that is valid by itself but not with the other fields."""
    return PydanticCustomError("misfit", "{reason}", {"reason": reason, "param": param})


class Strict(BaseModel):
    """Base of every request model."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
