"""Tests of engine/weights/, over tiny models."""
