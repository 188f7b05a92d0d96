"""Tests of server/, without a model."""
