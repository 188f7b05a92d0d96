"""Tests of engine/structured_output/, over tiny models."""
