"""Tests of engine/engine.py and the modules beside it, over tiny models."""
