"""Timing of passes and steps before any request, and evaluation of many trees at one position."""
