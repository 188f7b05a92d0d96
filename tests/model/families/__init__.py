"""Families of transformers' models: which are served, by what, and with which drafters."""
