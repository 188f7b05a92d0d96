"""Tests of engine/worker/, without a model."""
