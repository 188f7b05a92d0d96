"""Tests of engine/structured_output/, without a model."""
