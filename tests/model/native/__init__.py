"""Tests of engine/native/, over tiny models."""
