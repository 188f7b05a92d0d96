"""The table of Dynamic Delayed Tree Expansion (arXiv 2602.16994) in miniature: every verifier's best trees, and their ceiling.

python -m benchmarks.paper --pairs smollm2-head --out paper/
"""
