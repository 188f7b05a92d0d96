"""Tests of benchmarks/, over tiny models."""
