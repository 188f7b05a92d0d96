"""Us against other engines: the same weights, prompts and sampling, in turns on one machine.

python -m benchmarks.peers setup
python -m benchmarks.peers run --config configs/default.yaml --out peers.jsonl
python -m benchmarks.peers report peers.jsonl
"""
