"""A request's options of speculation, and which combinations are refused."""

from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from engine.core.tree import DEFAULT_BRANCHES, DEFAULT_DEPTH, DEFAULT_NODES, DEFAULT_SHAPE, DELAYED_TREES, Expansion, TreeName
from engine.core.types import Speculation
from engine.core.verifier_table import InexactPairError, VerifierName, require_exact
from server.schemas.strict_model import MAX_INTEGER, Strict, misfit


class SpeculativeOptions(Strict):
    """A request's options of speculation. They change the speed, never the distribution of the text."""

    enabled: bool = Field(True, description="False: one token per step.")
    verifier: VerifierName | None = Field(None, description="Rule that accepts drafted tokens; null: the server's.")
    tree: TreeName | None = Field(None, description="Which tree; null: a delayed one if its shape is given, else the server's.")
    trunk: int | None = Field(None, ge=0, le=64, description="Tokens drafted before a delayed tree branches.")
    branches: int | None = Field(None, ge=1, le=16, description="Paths below a delayed tree's trunk; else children a node.")
    depth: int | None = Field(None, ge=0, le=64, description="Tokens of each path below the trunk; levels of the other trees.")
    max_nodes: int | None = Field(None, ge=1, le=MAX_INTEGER, description="Most drafted tokens of a tree.")
    trace: bool = Field(False, description="A stream describes every step: the drafted tree, probabilities, accepted nodes.")

    @model_validator(mode="after")
    def _options_fit_together(self) -> Self:
        others = (self.verifier, self.tree, self.trunk, self.branches, self.depth, self.max_nodes)
        if not self.enabled and any(option is not None for option in others):
            raise misfit("speculative", "enabled is false, so no other option of speculation is accepted")
        if not self._has_own_shape and (self.branches or 1) > 1 and not self.depth:
            raise misfit("speculative.depth", "branches without depth draft nothing: more than one needs a depth of at least 1")
        if self._has_own_shape and self.trunk:
            raise misfit("speculative.trunk", f"a {self.tree} tree has no trunk")
        if self._has_own_shape and self.depth == 0:
            raise misfit("speculative.depth", f"a {self.tree} tree needs a depth of at least 1")
        return self

    @model_validator(mode="after")
    def _names_an_exact_pair(self) -> Self:
        if self.verifier is not None and self.expansion is not None:
            try:
                require_exact(self.expansion, self.verifier)
            except InexactPairError as error:
                raise misfit("speculative", str(error)) from error
        return self

    @property
    def _has_own_shape(self) -> bool:
        return self.tree is not None and self.tree not in DELAYED_TREES

    @property
    def expansion(self) -> Expansion | None:
        """The tree, None if no part of it was given. Defaults: no trunk, one branch, no depth; a name alone: default size."""
        if self._has_own_shape:
            assert self.tree is not None
            branches, depth = self.branches or DEFAULT_BRANCHES, self.depth or DEFAULT_DEPTH
            return Expansion(0, branches, depth, self.tree, self.max_nodes or DEFAULT_NODES)
        tree = self.tree or "delayed"
        if self.trunk is None and self.branches is None and self.depth is None:
            return None if self.tree is None else Expansion(*DEFAULT_SHAPE, tree)
        return Expansion(self.trunk or 0, self.branches or 1, self.depth or 0, tree)

    def to_speculation(self) -> Speculation:
        """Return the engine's record."""
        return Speculation(self.enabled, self.expansion, self.verifier, self.max_nodes, self.trace)


def _without_trace(options: SpeculativeOptions) -> SpeculativeOptions:
    if options.trace:
        raise misfit("speculative.trace", "trace is accepted only in streams of completions and chat completions")
    return options


UntracedOptions = Annotated[SpeculativeOptions, AfterValidator(_without_trace)]  # where no stream has a trace
