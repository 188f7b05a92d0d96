"""The language of this repository: banned words, names of classes and tests, short sentences, small folders and C++ functions.

Prints each fault.

python .ci/language.py
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("engine", "server", "selector")
TESTS = ("tests",)
BANNED = {
    "who": "name the subject: a request, a sequence, a policy",
    "law": "distribution, probabilities",
    "told": "reported, returned",
    "say": "report, state",
    "ask": "request, query",
    "hear": "receive",
    "foretell": "predict",
    "stand": "be reused, be valid",
    "settled": "cached, decided",
    "stake": "potential gain",
    "worth": "expected value",
    "price": "cost",
    "lie": "be stored in",
    "newcomer": "new request",
    "joiner": "new request",
    "suspect": "quarantined request",
    "acquit": "clear",
    "anteroom": "pending grammars",
    "desk": "engine loop",
    "ledger": "request table",
}
FORMS = {
    "who": r"who|whom|whoever|nobody|somebody",
    "law": r"laws?",
    "told": r"told|tells?|telling",
    "say": r"says?|said|saying",
    "ask": r"asks?|asked|asking",
    "hear": r"hears?|heard",
    "foretell": r"foretells?|foretold",
    "stand": r"stands?|standing|stood",
    "price": r"prices?|priced",
    "lie": r"lies?|lay|lays",
    "newcomer": r"newcomers?",
    "joiner": r"joiners?",
    "suspect": r"suspects?",
    "acquit": r"acquit\w*",
}
WORDS = {word: re.compile(rf"(?<![A-Za-z])(?:{FORMS.get(word, word)})(?![A-Za-z])", re.IGNORECASE) for word in BANNED}
# Names that users have: metrics, settings and fields of files.
KEPT = re.compile(
    r"latebranch_\w+|foretold_seconds|last_step_told|num_laws|\"laws\"|'prices'|\"prices\"|stand[-_ ]in|stand-alone|standalone",
    re.IGNORECASE,
)
SHORT_SENTENCES = ("README.md", "docs/quickstart.md", "docs/architecture.md", "docs/selector.md")
MOST_WORDS = 35  # of a sentence in those
MOST_DOC_WORDS = 45_000
MOST_TEST_WORDS = 7  # of a test's name, after `test`
MOST_FILES = 25  # of sources in a folder
MOST_LINES = 60  # of a function in C++
LONG_TEST = rf"test(_[^_]*){{{MOST_TEST_WORDS + 1}}}"
CASE_CHANGE = re.compile(r"(?<=[a-z])(?=[A-Z])")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
SOURCE = re.compile(r"\.(py|cpp|h|js|mjs|html|css|sh|yml)$|^Makefile$")
# Files in plain words that the tokenizer of Python does not read.
OTHERS = re.compile(r"^(engine/.*\.(cpp|h)|server/.*\.(js|html|css)|deploy/.*|docs/drawings/.*\.mjs|Makefile|[\w-]*\.yml)$")


def tracked() -> list[Path]:
    """Return the source files of every kind that git tracks."""
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [ROOT / name for name in names if SOURCE.search(name) and (ROOT / name).is_file()]


def python_files(folders: tuple[str, ...] = SOURCES) -> list[Path]:
    """Return the source files."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def documents() -> list[Path]:
    """Return the documents at the top level and those of docs/."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def banned_in(text: str) -> Iterator[str]:
    """Yield what to write in place of each banned word of a text."""
    plain = KEPT.sub("", text)
    for word, pattern in WORDS.items():
        if found := pattern.search(plain):
            yield f"'{found[0]}': {BANNED[word]}"


def prose_of(
    path: Path, kinds: tuple[int, ...] = (tokenize.COMMENT, tokenize.STRING, tokenize.NAME)
) -> Iterator[tuple[int, str]]:
    """Yield lines of a source file's comments, strings and names, with their numbers; names of classes as separate words."""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type in kinds:
            text = CASE_CHANGE.sub("_", token.string) if token.type == tokenize.NAME else token.string
            for offset, line in enumerate(text.splitlines()):
                yield token.start[0] + offset, line


def words_of_test(path: Path) -> Iterator[tuple[int, str]]:
    """Yield a test file's comments, names, docstrings and messages of assertions, with their lines; other strings are data."""
    yield from prose_of(path, (tokenize.COMMENT, tokenize.NAME))
    for node in ast.walk(ast.parse(path.read_text())):
        found: ast.AST | None = node.msg if isinstance(node, ast.Assert) else None
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            found = node.body[0]
        for part in ast.walk(found) if found is not None else ():
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                for offset, line in enumerate(part.value.splitlines()):
                    yield part.lineno + offset, line


def test_faults() -> Iterator[str]:
    """Yield banned words and long names of tests."""
    for path in python_files(TESTS):
        for number, line in words_of_test(path):
            for fault in banned_in(line):
                yield f"{path.relative_to(ROOT)}:{number}: {fault}"
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and re.match(LONG_TEST, node.name):
                yield f"{path.relative_to(ROOT)}:{node.lineno}: {node.name} has more than {MOST_TEST_WORDS} words after `test`"


def word_faults() -> Iterator[str]:
    """Yield banned words in sources, benchmarks, pages, deployment and documents."""
    benchmarks = (path for path in sorted((ROOT / "benchmarks").rglob("*.py")) if "peers" not in path.parts)
    for path in (*python_files(), *benchmarks):
        for number, line in prose_of(path):
            for fault in banned_in(line):
                yield f"{path.relative_to(ROOT)}:{number}: {fault}"
    for path in (path for path in tracked() if OTHERS.search(str(path.relative_to(ROOT)))):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for fault in banned_in(line):
                yield f"{path.relative_to(ROOT)}:{number}: {fault}"
    for path in documents():
        for number, line in enumerate(without_code(path.read_text()).splitlines(), 1):
            for fault in banned_in(re.sub(r"`[^`]*`|\]\([^)]*\)", "", line)):
                yield f"{path.relative_to(ROOT)}:{number}: {fault}"


def class_faults() -> Iterator[str]:
    """Yield class names that are used twice."""
    places = defaultdict(list)
    for path in python_files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(ROOT)))
    for name, paths in places.items():
        if len(paths) > 1:
            yield f"class {name} is defined in {', '.join(paths)}"


def without_code(text: str) -> str:
    """Return a document with its code blocks blank, lines kept."""
    return re.sub(r"^```.*?^```", lambda block: "\n" * block[0].count("\n"), text, flags=re.MULTILINE | re.DOTALL)


def sentence_faults() -> Iterator[str]:
    """Yield long sentences of the documents that users read first."""
    for name in SHORT_SENTENCES:
        lines = [line for line in without_code((ROOT / name).read_text()).splitlines() if not line.startswith(("|", "#"))]
        for paragraph in re.split(r"\n\s*\n|\n(?=\s*[-*\d])", "\n".join(lines)):
            for sentence in re.split(r"(?<=[.:;!?])\s", paragraph):
                if (count := len(sentence.split())) > MOST_WORDS:
                    yield f"{name}: a sentence of {count} words: {' '.join(sentence.split())[:80]}..."


def size_faults() -> Iterator[str]:
    """Yield folders with too many files, and documents that are too long together."""
    counts = Counter(path.parent.relative_to(ROOT) for path in tracked())
    many = (folder for folder, count in counts.items() if count > MOST_FILES and folder.name != "findings")  # one file each
    yield from (f"{folder} has {counts[folder]} source files" for folder in many)
    words = sum(len(path.read_text().split()) for path in documents())
    if words > MOST_DOC_WORDS:
        yield f"README and docs have {words} words"


def function_faults() -> Iterator[str]:
    """Yield long functions of C++: blocks that no class, namespace or `extern` opens."""
    for path in (path for path in tracked() if path.suffix in {".cpp", ".h"}):
        opened: list[tuple[int, str]] = []
        statement = ""
        for number, line in enumerate(path.read_text().splitlines(keepends=True), 1):
            for char in re.sub(r"//.*|\"(\\.|[^\"])*\"|'(\\.|[^'])'", "", line):
                if char == "{":
                    opened.append((number, statement))
                elif char == "}" and opened:
                    first, head = opened.pop()
                    if number - first >= MOST_LINES and not re.search(r"\b(class|struct|namespace|extern|enum)\b", head):
                        yield f"{path.relative_to(ROOT)}:{first}: a function of {number - first + 1} lines"
                statement = "" if char in "{};" else statement + char


def main() -> int:
    """Print every fault; return 1 if there is one."""
    faults = [
        *dict.fromkeys([*word_faults(), *test_faults(), *class_faults(), *sentence_faults(), *size_faults(), *function_faults()])
    ]
    sys.stdout.writelines(f"{fault}\n" for fault in faults)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
