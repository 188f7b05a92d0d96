"""Tree-masked attention: rows of a step are packed into segments, and each segment attends to its slots."""
