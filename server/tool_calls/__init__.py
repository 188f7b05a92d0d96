"""Tool calls: what a model's chat template knows of them, and how they are read out of its text."""
