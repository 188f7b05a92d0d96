"""Records of steps: statistics, traced rows, probabilities of trees, and the trace file."""
