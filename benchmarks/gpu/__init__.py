"""What a GPU makes of the engine: whether its passes are exact, and what they take, with CUDA graphs and without."""
