"""Tests of server/tool_calls/, over a fake engine."""
