"""From logits to the distribution that a request asks for, and the random numbers that draw from it."""
