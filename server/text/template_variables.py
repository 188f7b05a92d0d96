"""Finds the variables that a chat template reads. Knows Jinja only."""

import re
from typing import Any

from jinja2 import Environment, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser


class _GenerationBlock(Extension):
    """Parses transformers' block tag `generation`, which marks the assistant's text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the statements of the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def template_variables(template: Any) -> frozenset[str]:
    """Return the variables that a template, or one of several templates by name, reads from its context."""
    texts = template.values() if isinstance(template, dict) else [template]
    return frozenset().union(*(_variables(text) for text in texts if isinstance(text, str)))


def _variables(text: str) -> set[str]:
    environment = Environment(extensions=[_GenerationBlock, loopcontrols], autoescape=False)
    try:
        return find_undeclared_variables(environment.parse(text))
    except TemplateError:
        return set(re.findall(r"[A-Za-z_]\w*", text))  # an unknown tag: any name may be a variable
