"""Distils a draft head from a target: the target generates texts, and the head learns the distributions of their tokens.

collect(corpus, model, layers, prompts)                  texts and the target's states, in shards on disk
Trainer(head, embeddings, rows, plan, work).run(texts)   trains on chains as served; checkpoints, resumes
evaluate(head, embeddings, output_rows, texts)           overlap with the target's distribution at each depth of a chain
"""
