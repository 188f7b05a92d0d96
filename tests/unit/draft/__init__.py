"""Tests of engine/draft/, without a model."""
