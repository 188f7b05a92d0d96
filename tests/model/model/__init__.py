"""Tests of engine/model/, over tiny models."""
