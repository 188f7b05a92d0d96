"""Tests of server/generation/, over a fake engine."""
