"""What choosing computes over numbers alone, compiled where there was a compiler; elsewhere numpy does the same."""
