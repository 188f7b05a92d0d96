"""Tests of engine/attention/, over tiny models."""
