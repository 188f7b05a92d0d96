"""Tests of server/cli/, over tiny models."""
