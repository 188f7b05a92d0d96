"""Constraints of a text, in OpenAI's format (`response_format`) and in vLLM's (`structured_outputs`), as one grammar."""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from engine.core.sampling_limits import MAX_GRAMMAR_CHARS
from engine.core.types import Grammar, GrammarKind
from server.schemas.exact_json import exactly_dumped, exactly_parsed
from server.schemas.strict_model import Description, Strict, misfit

MAX_STRINGS = 1024
_GrammarText = Annotated[str, StringConstraints(min_length=1, max_length=MAX_GRAMMAR_CHARS)]
_Schema = dict[str, Any]


def _parsed(schema: _Schema | str) -> _Schema:
    """Return a schema that may be given as JSON text; raise ValueError for any other text, and for an invalid x-guidance."""
    value = exactly_parsed(schema) if isinstance(schema, str) else schema
    if not isinstance(value, dict):
        raise ValueError("must be a schema or the JSON text of one, an object")
    if not isinstance(value.get("x-guidance", {}), dict):
        raise ValueError("its x-guidance must be an object")
    return value


class JsonSchema(Strict):
    """A named schema. It is always enforced, with any value of `strict`."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: Description | None = None
    schema_: _Schema = Field(alias="schema")
    strict: bool | None = Field(None, description="Accepted; every schema is enforced.")


class ResponseFormat(Strict):
    """The format of the answer: any text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise misfit("response_format.json_schema", "json_schema is given with type json_schema, and only then")
        return self

    @property
    def grammar(self) -> Grammar | None:
        """The grammar that a text must match; None for any text."""
        if self.json_schema is not None:
            return Grammar(GrammarKind.JSON_SCHEMA, exactly_dumped(self.json_schema.schema_))
        return Grammar(GrammarKind.JSON_OBJECT) if self.type == "json_object" else None


class StructuredOutputs(Strict):
    """One constraint on the text, and for JSON the whitespace between its parts."""

    json_: Annotated[_Schema | _GrammarText, AfterValidator(_parsed)] | None = Field(
        None, alias="json", description="A JSON schema, or its text."
    )
    json_object: bool | None = Field(None, description="Any JSON object.")
    regex: _GrammarText | None = Field(None, description="A regular expression in the syntax of Rust's regex crate.")
    choice: Annotated[list[str], Field(min_length=1, max_length=MAX_STRINGS, fail_fast=True)] | None = None
    grammar_: _GrammarText | None = Field(None, alias="grammar", description="A grammar in llguidance's Lark, or GBNF.")
    disable_any_whitespace: bool | None = Field(
        None, description="No whitespace between the parts of JSON; default: none, a space, or a line break with an indent."
    )
    whitespace_pattern: _GrammarText | None = Field(
        None, description="A regular expression for that whitespace; [ \\t\\n\\r]+ allows any."
    )

    @model_validator(mode="after")
    def _has_one_constraint(self) -> Self:
        given = [value for value in (self.json_, self.regex, self.choice, self.grammar_) if value is not None]
        if len(given) + bool(self.json_object) != 1:
            raise misfit("structured_outputs", "exactly one of json, json_object, regex, choice and grammar must be given")
        if self.json_ is None and not self.json_object and (self.disable_any_whitespace or self.whitespace_pattern is not None):
            raise misfit("structured_outputs", "disable_any_whitespace and whitespace_pattern are accepted only with JSON")
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise misfit("structured_outputs", "disable_any_whitespace leaves no room for a whitespace_pattern")
        return self

    @property
    def grammar(self) -> Grammar:
        """The grammar that a text must match."""
        if self.regex is not None:
            return Grammar(GrammarKind.REGEX, self.regex)
        if self.choice is not None:
            return Grammar(GrammarKind.CHOICE, exactly_dumped(self.choice))
        if self.grammar_ is not None:
            return Grammar(GrammarKind.LARK, self.grammar_)
        schema: _Schema = {"type": "object"} if self.json_ is None else _parsed(self.json_)
        return Grammar(GrammarKind.JSON_SCHEMA, exactly_dumped(schema | self._options(schema)))

    def _options(self, schema: _Schema) -> _Schema:
        """Return the library's whitespace options, which are part of the schema."""
        options: _Schema = {}
        if self.disable_any_whitespace:
            options["whitespace_flexible"] = False
        if self.whitespace_pattern is not None:
            options["whitespace_pattern"] = self.whitespace_pattern
        return {"x-guidance": {**schema.get("x-guidance", {}), **options}} if options else {}
