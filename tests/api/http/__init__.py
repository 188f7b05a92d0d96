"""Tests of server/http/, over a fake engine."""
