"""Tests of server/grammar/, over a fake engine."""
