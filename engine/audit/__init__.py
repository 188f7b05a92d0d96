"""Proof on one's own models that speculation changes nothing: what an engine said, held against the target's own laws.

    collect(engine, plan)          what a speculating engine says: samples, greedy and seeded texts
    examine(collected, reference)  the report: each said token against the laws of transformers' own plain forward

The audit of a running server (engine.audit.background) uses the same statistics on a share of its requests.
"""
