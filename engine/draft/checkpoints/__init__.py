"""Drafters that a user has: EAGLE-3, DFlash and Medusa checkpoints of other projects."""
