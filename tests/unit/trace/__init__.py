"""Tests of engine/trace/, without a model."""
