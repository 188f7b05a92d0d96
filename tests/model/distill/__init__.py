"""Tests of engine/distill/, over tiny models."""
