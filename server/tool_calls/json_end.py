"""Finds the end of a JSON object in text that arrives in pieces. Knows brackets and strings, not values."""


class JsonEnd:
    """Owns the parse state of one object, which is fed from its opening brace on.

    With `is_strict` the object also ends before a control character in a string, which is no JSON. Models write such strings.
    """

    def __init__(self, is_strict: bool = False) -> None:
        self._is_strict = is_strict
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False

    def feed(self, text: str) -> int | None:
        """Return how much of `text` belongs to the object if it ends there, else None.

        It ends after its closing bracket, or before a `<` or a backtick, which are not JSON outside of strings.
        """
        for at, char in enumerate(text):
            if self._is_in_string:
                if self._is_strict and char < " ":
                    return at
                self._step_in_string(char)
            elif char == '"':
                self._is_in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "<`":
                return at
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return at + 1
        return None

    def _step_in_string(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._is_in_string = False
