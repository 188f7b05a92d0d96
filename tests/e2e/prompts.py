"""Short prompts of several kinds. Some repeat themselves, so that even a look-up in the text finds something to draft."""

PROMPTS = [
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + ",
    "The red fox met the brown bear. The red fox said to the brown bear: the red fox",
    "Question: What is 17 + 25?\nAnswer: 42\nQuestion: What is 18 + 25?\nAnswer:",
    "Once upon a time, in a village by the sea, there lived",
    "SELECT name, age FROM people WHERE age > 30; SELECT name, age FROM people WHERE",
    "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is",
    '{"name": "Ada", "born": 1815}, {"name": "Alan", "born": 1912}, {"name":',
    "La maison est grande. The house is big. Le chat est petit. The cat is small. Le chien est",
]
