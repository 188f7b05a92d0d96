"""Two hundred different prompts of eight kinds: each kind's templates with each of its fillings, kinds taking turns."""

from itertools import product

_KINDS: dict[str, tuple[list[str], list[str]]] = {
    "code": (
        [
            "def {}(items):\n    ",
            "// {} in C\n#include <stdio.h>\n\nint ",
            "class {}:\n    def __init__(self, ",
            "import unittest\n\nclass Test_{}(unittest.TestCase):\n    def ",
            "fn {}(values: &[i64]) -> i64 {{\n    let mut ",
        ],
        ["binary_search", "moving_average", "word_count", "merge_intervals", "matrix_power"],
    ),
    "prose": (
        [
            "Once upon a time, {}, there lived",
            "The old woman told us of {}, and then",
            "It was raining. I remembered {} and",
            "Nobody in the village spoke about {}, because",
            "Chapter 1. {}.\n\n",
        ],
        ["far from the sea", "the winter of the wolves", "a house of glass", "her brother's ship", "the silent mill"],
    ),
    "translation": (
        [
            "English: {}\nFrench:",
            "English: {}\nGerman:",
            "The house is big. La casa es grande. {}",
            "Translate into Italian: {}\nItalian:",
            "{} (in Latin:",
        ],
        ["The cat sleeps.", "Where is the station?", "I would like some water.", "My sister reads a book.", "It is late."],
    ),
    "mathematics": (
        [
            "Question: What is {}?\nAnswer: Let us think step by step.",
            "Compute {} = ",
            "{} is larger than",
            "Theorem. For every integer n, {}.\nProof.",
            "Q: 2 + 2\nA: 4\nQ: 3 + 5\nA: 8\nQ: {}\nA:",
        ],
        ["17 * 23", "(8 + 5) / 4", "2^10 - 24", "n^2 + n is even", "144 - 3 * 19"],
    ),
    "questions": (
        [
            "Q: {}\nA:",
            "A student asks: {} The teacher answers:",
            "{} Give three reasons.\n1.",
            "Interviewer: {}\nGuest:",
            "FAQ\n\n{}\n",
        ],
        ["Why is the sky blue?", "How do bees find flowers?", "What is inflation?", "Who built the pyramids?", "Can fish hear?"],
    ),
    "lists": (
        [
            "Five facts about {}:\n1.",
            "Shopping list for {}:\n-",
            "Glossary of {}\n\nA:",
            "Steps to prepare {}:\nStep 1:",
            "{}: a table\n| name | size |\n| --- | --- |\n|",
        ],
        ["sailing", "a birthday cake", "a camping trip", "mountain weather", "city birds"],
    ),
    "data": (
        [
            '{{"kind": "{}", "items": [{{"name":',
            "SELECT name, price FROM {} WHERE price > 10; SELECT",
            "id,{},year\n1,red,1990\n2,blue,1991\n3,",
            "<{}>\n  <entry>one</entry>\n  <entry>two</entry>\n  <entry>",
            "# {}.yaml\nname: first\nsize: 3\n---\nname:",
        ],
        ["books", "cars", "songs", "tools", "cities"],
    ),
    "dialogue": (
        [
            "Anna: What do you think of {}?\nBen:",
            "Dear Sir or Madam, I am writing to you about {}.",
            "User: Tell me about {}.\nAssistant:",
            "HAMLET. O, {}!\nHORATIO.",
            "[09:12] <mia> {} is broken again\n[09:13] <leo>",
        ],
        ["the new bridge", "the coffee machine", "the lost parcel", "the night train", "the garden wall"],
    ),
}


def _texts(kind: str) -> list[str]:
    templates, fillings = _KINDS[kind]
    return [template.format(filling) for template, filling in product(templates, fillings)]


SEEDED_PROMPTS = [text for together in zip(*map(_texts, _KINDS), strict=True) for text in together]
