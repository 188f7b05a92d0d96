"""Tests of engine/sampling/, over tiny models."""
