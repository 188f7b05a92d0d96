"""Tests of engine/worker/, over tiny models."""
