"""Tests of benchmarks/, without a model."""
