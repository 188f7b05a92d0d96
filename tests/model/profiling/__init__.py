"""Tests of engine/profiling/, over tiny models."""
