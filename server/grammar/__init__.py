"""Grammars are checked and compiled in a process of their own, because a compiler can be slow or crash."""
