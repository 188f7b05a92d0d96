"""`latebranch audit --url`: tests an OpenAI-compatible server from outside, by its answers alone.

    client      HTTP: bodies in, completions out
    dialect     what the server accepts, and its defaults, orders and field names
    sources     the expected distributions: of a model's weights, or the server's own log-probabilities
    draws       tests of sampled tokens, and of greedy ones
    exact       checks of texts that leave no choice: greedy, streamed, stopped, repeated
    audit       the plan within the bound of requests
    report      its records, its verdict, and its text

The statistics are those of engine.audit.
"""
