"""Tests of engine/core/, without a model."""
