"""Tool calls: the support of a model's chat template, and parsing calls from the model's text."""
