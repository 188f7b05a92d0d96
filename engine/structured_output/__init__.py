"""Grammars over token ids: compiled beside the steps, and masks of the tokens that may follow each node."""
