"""Drafts without a model: continuations found in a request's own text, in predictions and in recent outputs."""
