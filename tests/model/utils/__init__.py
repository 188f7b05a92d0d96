"""Tests of engine/utils/, over tiny models."""
