"""Tests of engine/draft/, over tiny models."""
