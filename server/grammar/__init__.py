"""Checks and compiles grammars in a separate process, because a compiler can be slow or crash."""
