"""Drafters against plain decoding and each other: by kind of prompt and temperature, at equal node budgets.

python -m benchmarks.drafters run --config configs/qwen-coder.yaml --drafters ngram model --out drafters.jsonl
python -m benchmarks.drafters report drafters.jsonl
"""
