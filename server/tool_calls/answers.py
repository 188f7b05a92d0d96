"""The grammar of a text that is JSON of a schema or calls of tools. Knows text only."""


def answer_or_calls(schema: str, calls: str) -> str:
    """Return the grammar of a text that is JSON of a schema, or else matches `calls`, a grammar whose first rule is `start`.

    The first character decides: markup of calls begins with none that begins JSON.
    """
    start, _, rest = calls.partition("\n")
    return f"start: answer | forced\nanswer: %json {schema}\nforced: {start.removeprefix('start: ')}\n{rest}"
