"""Passes and steps timed before any request, and many trees evaluated at one position."""
