"""Distils a draft head from a target: the target writes texts, and the head learns the laws they were drawn from.

collect(corpus, model, layers, prompts)   texts and the target's states, in shards on disk
Trainer(head, rows, corpus).run()         learns drafted chains as they will be served; checkpoints, resumes
evaluate(head, rows, texts)               overlap with the target's law at each depth of a chain
"""
