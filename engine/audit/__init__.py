"""Statistical tests that speculation is lossless: an engine's output against the target's own distributions.

    collect(engine, plan)          the output of a speculating engine: samples, greedy and seeded sequences
    examine(collected, reference)  the report: each generated token against the distributions of transformers' plain forward

The audit of a running server (engine.audit.background) applies the same statistics to a share of its requests.
"""
