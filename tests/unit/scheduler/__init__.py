"""Tests of engine/scheduler/, without a model."""
