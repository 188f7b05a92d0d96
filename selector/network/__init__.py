"""A network that predicts the outcome of each expansion: features, training, evaluation, and the estimator that serves it.

It implements the same protocol as the counting estimator (selector.acceptance), so the policy treats both alike.
"""
