"""What one step may still spend while its rows are planned, oldest first: target tokens, drafted nodes, draft feed."""

from engine.plan import Row


class StepBudget:
    """Counts down. Every row has one target token for granted; trees leave half of the step to prompts that wait to be fed.

    Owned by the planning of one step.
    """

    def __init__(self, max_step_tokens: int, num_rows: int, num_prompt_tokens: int) -> None:
        self._tokens = max_step_tokens - num_rows
        self._tree_tokens = max(0, self._tokens - min(num_prompt_tokens, max_step_tokens // 2))
        self._rows_left = num_rows
        self.draft_feed = max_step_tokens

    def certain(self, num_uncached: int) -> int:
        """Return how many of a sequence's uncached tokens the step can feed; at least 1."""
        return min(num_uncached, max(0, self._tokens) + 1)

    def tree(self, num_certain: int) -> int:
        """Return how many nodes the next row may draft: its share of what is left, so that no row takes the others'."""
        share = self._tree_tokens // max(1, self._rows_left)
        return max(0, min(share, self._tokens - num_certain + 1))

    def skip(self) -> None:
        """Leave the next sequence out: it lost its slots."""
        self._rows_left -= 1

    def spend(self, row: Row) -> None:
        """Take off what a planned row uses."""
        self._rows_left -= 1
        self._tokens -= len(row.certain_ids) - 1 + row.expansion.num_draft_tokens
        self._tree_tokens -= row.expansion.num_draft_tokens
        self.draft_feed -= len(row.draft_ids)
