"""Tests of engine/audit/, over tiny models."""
