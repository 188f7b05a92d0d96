"""What is recorded of a step: counters, traced rows, probabilities of a tree, and the trace file."""
