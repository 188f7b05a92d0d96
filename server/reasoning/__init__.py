"""Reasoning blocks: which model writes them, and how they are split off from the model's text."""
