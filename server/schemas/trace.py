"""What a chunk of a traced request's stream tells of its step, and what a page of recorded steps is drawn from."""

from typing import Literal

from pydantic import BaseModel, Field

Part = Literal["root", "trunk", "branch", "cached", "prediction"]


class TracedToken(BaseModel):
    """A token by itself."""

    token_id: int
    text: str = Field(description="U+FFFD where its bytes are no UTF-8 by themselves.")
    bytes: list[int] | None = Field(None, description="Its bytes, where they are no UTF-8 by themselves.")
    target_prob: float | None = Field(None, description="By the law that the request draws it from; none of a root.")


class TracedNode(TracedToken):
    """A node of a drafted tree. Parents come before children; the first node is the root, the last token before the step."""

    parent: int | None = Field(description="A place in the list of nodes.")
    depth: int
    part: Part = Field(
        description="What drafted it: a model, before the tree forks (trunk) or behind (branch), text said before (cached), or "
        "the request's prediction."
    )
    num_draws: int = Field(description="How often it was drawn; two equal draws are one node.")
    draft_prob: float | None = None
    accepted: bool


class StepTrace(BaseModel):
    """One step of one sample. Probabilities are those after the request's parameters; at temperature 0, of temperature 1."""

    step: int = Field(description="The engine's number of the step; other requests may have had a part in it.")
    position: int = Field(description="Absolute position of the root.")
    verifier: str
    expansion: str = Field(description="The tree that was to be grown, as settings write it.")
    reason: str = Field(description="Why the policy chose as it did for the batch; a tree that a request names is grown anyway.")
    nodes: list[TracedNode]
    extra: TracedToken | None = Field(description="The token behind the accepted path; none of a step that failed.")
    num_emitted: int = Field(description="Tokens of the accepted path and the extra one that are part of the text.")
    finish: str | None = None
    expected_tokens: float | None = Field(None, description="Mean of tokens that this tree brings, over the verifier's draws.")
    step_s: float
    stage_s: dict[str, float]
