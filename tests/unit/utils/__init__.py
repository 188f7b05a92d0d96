"""Tests of engine/utils/, without a model."""
