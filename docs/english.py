"""Count violations of the rules for English: `python docs/english.py [--list]`.

Counts docstrings that begin with a question word, sentences of the pages with more than 30 words,
words on a denylist in docstrings, comments and pages, vague variable names outside tests,
and the README's words, lines and numbers.
`--list` prints each place. Exits with 1 where the README is over one of its limits.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LONGEST_SENTENCE = 30
README_LIMITS = {
    "words": 500, "lines": 80, "numbers outside code": 20, "numbers before the first command": 0
}  # fmt: skip
QUESTION = re.compile(
    r"(?:What|Whether|How|Where|When|Why|Which|Who|Whose|That|The (?:one|ones)|Those|Of)\b"
)
# Words that make a reader search for their noun, or turn data into speech.
DENIED = re.compile(
    r"\b(?:told|said|whoever|whatever becomes|amiss|thereof|therein|thereby|hereby|whence|whither"
    r"|of its own|of their own|none of the answers|that of|those of|nobody|becomes of"
    r"|has its say|so to speak)\b",
    re.IGNORECASE,
)
# Variables that do not name the value they hold.
DENIED_NAMES = {"found", "told", "said", "asked", "mine", "ours", "theirs", "lost", "own", "beside"}
# Quotations of foreign text: log lines, titles of threads and papers.
QUOTED = re.compile(r"\"[^\"\n]*\"|“[^”\n]*”|`[^`\n]*`")
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"(?<![\w.])[+−-]?\d[\d,.]*%?")
WRITTEN = {"docs/artifacts.md", "MANIFEST.md"}


def tracked(*patterns: str) -> list[str]:
    """Return the names of the tracked files that match the patterns, without generated ones."""
    listed = subprocess.run(
        ["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [name for name in listed.stdout.splitlines() if name not in WRITTEN]


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str, bool]]:
    """Yield each docstring of a module: its line, its text, and whether it is a test's."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text, getattr(node, "name", "").startswith("test_")


def denied_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each assigned variable or parameter on the denylist."""
    for node in ast.walk(tree):
        name = node.arg if isinstance(node, ast.arg) else None
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        if name in DENIED_NAMES:
            yield node.lineno, name  # type: ignore[attr-defined]


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each comment of a module."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def sentences(page: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each sentence outside code, tables and headings."""
    text = FENCE.sub(lambda match: "\n" * match[0].count("\n"), page)
    line = 1
    for block in re.split(r"(\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) ))", text):
        prose = re.sub(r"\]\([^)]*\)|<[^>]*>", " ", block)
        if not re.match(r"\s*[|#]", prose):
            for sentence in re.split(r"(?<=[.!?:;])\s+", prose):
                yield line, sentence
        line += block.count("\n")


def places() -> Iterator[tuple[str, str, int, str]]:
    """Yield the kind, file, line and text of each place that is counted."""
    for name in tracked("*.py"):
        source = (ROOT / name).read_text(encoding="utf-8")
        tree = ast.parse(source)
        texts = [(line, text) for line, text, _ in docstrings(tree)]
        if not name.startswith("tests/"):
            for line, text in denied_names(tree):
                yield "vague variable names", name, line, text
        for line, text in texts:
            if QUESTION.match(text):
                yield "docstrings that begin with a question word", name, line, text
        for line, text in [*texts, *comments(source)]:
            if match := DENIED.search(QUOTED.sub("", text)):
                yield "denied words", name, line, match[0]
    for name in tracked("*.md"):
        page = (ROOT / name).read_text(encoding="utf-8")
        for line, text in sentences(page):
            if len(text.split()) > LONGEST_SENTENCE:
                yield f"sentences over {LONGEST_SENTENCE} words", name, line, text
            if match := DENIED.search(QUOTED.sub("", text)):
                yield "denied words", name, line, match[0]


def readme() -> dict[str, int]:
    """Return the README's counts of words, lines and numbers, by the names in README_LIMITS."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    prose, before = (
        re.sub(r"\]\([^)]*\)|`[^`]*`", " ", FENCE.sub("", part))
        for part in (page, page.partition("```")[0])
    )
    return {
        "words": len(page.split()),
        "lines": len(page.splitlines()),
        "numbers outside code": len(NUMBER.findall(prose)),
        "numbers before the first command": len(NUMBER.findall(before)),
    }


def main() -> int:
    """Print the counts, with `--list` each place, and return the exit status."""
    listing = sys.argv[1:] == ["--list"]
    counts: Counter[str] = Counter()
    for kind, name, line, text in places():
        counts[kind] += 1
        if listing:
            print(f"{name}:{line}: {kind}: {' '.join(text.split())[:90]}")
    for kind in sorted(counts):
        print(f"{counts[kind]:5} {kind}")
    status = 0
    for kind, count in readme().items():
        over = count > README_LIMITS[kind]
        status |= over
        print(f"{count:5} {kind} in README.md; at most {README_LIMITS[kind]}{': over' * over}")
    return status


if __name__ == "__main__":
    sys.exit(main())
