"""Every tree with every verifier at equal node budgets: block efficiency without verifier noise, and what a step costs.

python -m benchmarks.trees collect --config configs/qwen-coder.yaml --out trees.jsonl
python -m benchmarks.trees report trees.jsonl
    python -m benchmarks.trees paired trees.jsonl calibrated/traversal heap/traversal
"""
