"""Drafts without a model: continuations found in the prompt, in predictions, in recent and in edited texts."""
