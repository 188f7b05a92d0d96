"""Tests of engine/weights/, without a model."""
