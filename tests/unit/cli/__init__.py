"""Tests of server/cli/, without a model."""
