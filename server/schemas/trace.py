"""The trace of a step: in the chunks of a traced request's stream, and in the page of recorded steps."""

from typing import Literal

from pydantic import BaseModel, Field

Part = Literal["root", "trunk", "branch", "cached", "prediction"]


class TracedToken(BaseModel):
    """A token by itself."""

    token_id: int
    text: str = Field(description="U+FFFD where its bytes are no UTF-8 by themselves.")
    bytes: list[int] | None = Field(None, description="Its bytes, where they are no UTF-8 by themselves.")
    target_prob: float | None = Field(None, description="In the distribution that the request samples from; none for a root.")


class TracedNode(TracedToken):
    """A node of a drafted tree. Parents come before children; the first node is the root, the last token before the step."""

    parent: int | None = Field(description="A place in the list of nodes.")
    depth: int
    part: Part = Field(
        description="Its source: a model, before the tree forks (trunk) or after (branch), earlier text (cached), or the "
        "request's prediction."
    )
    num_draws: int = Field(description="How often it was drawn; two equal draws are one node.")
    draft_prob: float | None = None
    accepted: bool


class StepTrace(BaseModel):
    """One step of one sample. Probabilities include the request's parameters; at temperature 0 they are of temperature 1."""

    step: int = Field(description="The engine's number of the step, which may include other requests.")
    position: int = Field(description="Absolute position of the root.")
    verifier: str
    expansion: str = Field(description="The planned tree, in the notation of the settings.")
    reason: str = Field(
        description="The reason of the policy's choice for the batch; a tree that a request names is used anyway."
    )
    nodes: list[TracedNode]
    extra: TracedToken | None = Field(description="The token after the accepted path; null if the step failed.")
    num_emitted: int = Field(description="Tokens of the accepted path and the extra one that are part of the text.")
    finish: str | None = None
    expected_tokens: float | None = Field(None, description="Mean number of tokens of this tree, over the verifier's draws.")
    step_s: float
    stage_s: dict[str, float]
    read_bytes: int = Field(0, description="Bytes of weights and cached keys that the model's pass read at least.")
    operations: int = Field(0, description="Operations of its products.")
    bandwidth_share: float | None = Field(None, description="Those bytes over `step_s`, of the machine's peak; null in files.")
    compute_share: float | None = Field(None, description="Those operations over `step_s`, of the machine's peak.")
