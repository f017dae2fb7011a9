"""Write the tables of docs/results/settings.md from the records beside it.

After `connector-tax settings --json > docs/results/records/settings.json`:
`python docs/settings_page.py`. With `--check` it only says whether the page has them.
"""

import argparse
import json
import re
import sys
from pathlib import Path

from connector_tax import text
from connector_tax.settings import table
from connector_tax.settings.matrix import REFUSES, Matrix, Row, models_of, plain_of
from connector_tax.settings.request import PLAIN

PAGE = Path(__file__).parent / "results" / "settings.md"
RECORDS = Path(__file__).parent / "results" / "records"
_PART = "<!-- {} -->\n"
_END = "<!-- end -->\n"


def summary(matrix: Matrix) -> str:
    """Return a line for each model: plain's capacity, and what connectors make of it."""
    lines = ["| model, tokens | plain: blocks, requests at once | same capacity | other |",
             "| --- | --- | --- | --- |"]  # fmt: skip
    for model in models_of(matrix):
        plain = plain_of(matrix, model)
        same: list[str] = []
        others: dict[str, list[str]] = {}
        for row in matrix["rows"]:
            if row["model"] == model and row["connector"] != PLAIN:
                if row["capacity"] == plain["capacity"] and row["state"] != REFUSES:
                    same.append(row["connector"])
                else:
                    others.setdefault(_outcome(row, plain), []).append(row["connector"])
        words = "; ".join(f"**{outcome}**: {', '.join(names)}" for outcome, names in others.items())
        base = plain["capacity"][0]
        alike = "all" if not others else ", ".join(same)
        lines.append(
            f"| {model}, {base['length']:,} | {base['blocks']:,}, {base['requests']:.2f} |"
            f" {alike} |"
            f" {words or text.DASH} |"
        )
    return "\n".join(lines) + "\n"


def _outcome(row: Row, plain: Row) -> str:
    if row["state"] == REFUSES:
        needed = re.search(r"[\d.]+ GiB KV cache is needed", row["reason"])
        return f"refuses, “{needed[0] if needed else row['reason']}”"
    capacity, plain_capacity = row["capacity"][0], plain["capacity"][0]
    share = text.signed(100 * (capacity["requests"] / plain_capacity["requests"] - 1), 0)
    return f"{capacity['blocks']:,}, {capacity['requests']:.2f} ({share}%)"


def parts() -> dict[str, str]:
    """Return the page's parts by name."""
    matrix: Matrix = json.loads((RECORDS / "settings.json").read_text("utf-8"))
    return {"summary": summary(matrix), "matrix": table.as_markdown(matrix)}


def page(old: str) -> str:
    """Return the page with its parts written anew."""
    for name, content in parts().items():
        begin = re.escape(_PART.format(name))
        pattern = re.compile(rf"({begin}).*?({re.escape(_END)})", re.DOTALL)
        if not pattern.search(old):
            sys.exit(f"{PAGE.name}: no part {_PART.format(name).strip()}")
        old = pattern.sub(lambda match, c=content: f"{match[1]}\n{c}\n{match[2]}", old)  # type: ignore[misc]
    return old


def main() -> int:
    """Write the page, or say whether it is as the records say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    old = PAGE.read_text("utf-8")
    new = page(old)
    if check and new != old:
        sys.exit(f"{PAGE.name} differs from its records; python docs/settings_page.py")
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
