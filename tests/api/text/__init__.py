"""Tests of server/text/, over a fake engine."""
