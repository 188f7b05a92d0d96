"""Tests of engine/scheduler/, over tiny models."""
