"""From logits to the distribution of a request's sampling parameters, and the random numbers that draw from it."""
