"""Measurements of a server by what its client receives."""
