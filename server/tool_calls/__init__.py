"""Tool calls: what a model's chat template supports, and how calls are parsed from the model's text."""
