"""A network that predicts what each expansion would bring: features, training, evaluation, and the estimator that serves it.

Stands behind the same protocol as the counting estimator (selector.acceptance). The policy does not know which one it asks.
"""
