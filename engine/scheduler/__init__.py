"""The scheduler: which sequences run in a step, in which cache slots, within which token budget."""
