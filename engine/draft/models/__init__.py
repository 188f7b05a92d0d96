"""Drafts by a model: a draft model, an early exit of the target, or a head over its hidden states."""
