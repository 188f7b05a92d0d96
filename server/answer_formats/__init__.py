"""Converts pieces of text to the wire formats."""
