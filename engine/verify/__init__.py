"""Lossless acceptance: each rule takes a tree with its draft and target distributions and returns an accepted path."""
