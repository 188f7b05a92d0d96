"""Tests of engine/kv_cache/, over tiny models."""
