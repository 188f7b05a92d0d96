"""Tests of engine/trace/, over tiny models."""
