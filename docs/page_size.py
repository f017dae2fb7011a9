"""Measure the length of pages: `python docs/page_size.py results/x/report.html ...`.

Prints the number of words (all, and outside folded parts), the sentences over 35 words outside
tables, and the height in px at both widths. A semicolon ends a sentence, since most semicolons
separate items of a list. Needs `chromium` in PATH, which measures the heights.
"""

import argparse
import html
import json
import re
import shutil
import subprocess
import tempfile
from html.parser import HTMLParser
from pathlib import Path

WIDTHS = (1400, 390)
MOST_WORDS = 35
BLOCKS = {"p", "li", "h1", "h2", "h3", "figcaption", "td", "th", "summary", "dt", "dd", "div"}
SCRIPT = "<script>onload=()=>parent.document.title=document.documentElement.scrollHeight</script>"


class Prose(HTMLParser):
    """The text of a page: a list of blocks, with flags for folded blocks and for tables."""

    def __init__(self) -> None:
        super().__init__()
        self.inside: dict[str, int] = {}
        self.blocks: list[tuple[str, bool, bool]] = []
        self.text = ""

    def handle_starttag(self, tag: str, _: list[tuple[str, str | None]]) -> None:
        """End a block where another begins."""
        self._end(tag)
        self.inside[tag] = self.inside.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        """End a block where its element ends."""
        self._end(tag)
        self.inside[tag] = self.inside.get(tag, 1) - 1

    def handle_data(self, data: str) -> None:
        """Store the visible text."""
        if not any(self.inside.get(tag) for tag in ("script", "style", "title")):
            self.text += data

    def _end(self, tag: str) -> None:
        if tag in BLOCKS and self.text.strip():
            # The summary of what is folded is seen.
            folded = self.inside.get("details", 0) > self.inside.get("summary", 0)
            self.blocks.append((self.text, folded, bool(self.inside.get("table"))))
        if tag in BLOCKS:
            self.text = ""


def height(page: str, width: int) -> str:
    """Return the height of the page in a window of that width."""
    held = page.replace("</body>", f"{SCRIPT}</body>", 1)
    source = json.dumps(held).replace("</", "<\\/")
    with tempfile.TemporaryDirectory() as folder:
        around = Path(folder) / "around.html"
        around.write_text(
            f"<!doctype html><meta charset=utf-8><title>–</title><body><iframe id=f style="
            f"'border:0;width:{width}px'></iframe><script>f.srcdoc={source}</script>"
        )
        command = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom",
                   "--hide-scrollbars", "--virtual-time-budget=20000",
                   f"--user-data-dir={folder}/profile"]  # fmt: skip
        done = subprocess.run(
            [*command, around.as_uri()], capture_output=True, text=True, check=True
        )
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    return html.unescape(title[1]) if title else "–"


def main() -> None:
    """Print a line for each page."""
    parser = argparse.ArgumentParser(
        description="Print the length of pages. Needs chromium in PATH, which measures the heights."
    )
    parser.add_argument("pages", nargs="+", metavar="PAGE", help="results/<study>/report.html")
    pages = parser.parse_args().pages
    if shutil.which("chromium") is None:
        parser.error("chromium, which measures the heights, is not in PATH; Debian: apt install"
                     " chromium")  # fmt: skip
    print("page", "words", "not folded", f"sentences > {MOST_WORDS}", *WIDTHS, sep="\t")
    for name in pages:
        page = Path(name).read_text(encoding="utf-8")
        prose = Prose()
        prose.feed(page)
        words = [sum(len(text.split()) for text, folded, _ in prose.blocks if folded <= most)
                 for most in (True, False)]  # fmt: skip
        sentences = [s.split() for text, _, table in prose.blocks if not table
                     for s in re.split(r"(?<=[.!?;])\s", text)]  # fmt: skip
        long = sum(len(sentence) > MOST_WORDS for sentence in sentences)
        print(name, *words, long, *(f"{height(page, width)} px" for width in WIDTHS), sep="\t")


if __name__ == "__main__":
    main()
