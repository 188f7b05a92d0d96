"""Which sequences run in a step, in which slots of the cache, and what a step's token budget is spent on."""
