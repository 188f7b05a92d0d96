"""Passes whose shapes are known before: a batch's integers as one table on the device, attention that reads it, recordings."""
