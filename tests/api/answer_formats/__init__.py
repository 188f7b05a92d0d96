"""Tests of server/answer_formats/, over a fake engine."""
