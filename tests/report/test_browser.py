"""Test the page in a real browser: no request leaves it, nothing fails, tables sort, it fits a
phone.

Needs `chromium` (Debian: apt install chromium), and for the check of accessibility axe-core from
npm (`npm install --prefix build/browser axe-core`). What is not there is skipped.
"""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from connector_tax.config import ROOT
from connector_tax.figures import style
from connector_tax.figures.names import NAMES, draw
from connector_tax.figures.tables import StudyTables
from connector_tax.report.page import render
from tests.figures.figure_study import write_study
from tests.figures.figure_tables import Design

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed"),
]
AXE = ROOT / "build" / "browser" / "node_modules" / "axe-core" / "axe.min.js"
DARK, LIGHT = 0, 1  # values of Blink's setting preferredColorScheme
# Runs before any script of the page.
EARLY = """<script>
const seen = [];
addEventListener("error", (event) => seen.push(String(event.message)));
addEventListener("securitypolicyviolation", (event) => seen.push(`refused ${event.blockedURI}`));
</script>"""
# Runs after the page's scripts: clicks headings, filters, and sends the results to the parent.
LATE = """<script>
addEventListener("load", async () => {
  const table = document.querySelector("#ttft_p90-ref_safe table");
  const place = [...table.tHead.rows[0].cells].findIndex((cell) => cell.textContent === "Tax, %");
  const heading = table.tHead.rows[0].cells[place];
  const numbers = () => [...table.tBodies[0].rows].map((row) => Number(row.cells[place].dataset.n))
    .filter((number) => !Number.isNaN(number));
  heading.querySelector("button").click();
  const up = numbers();
  heading.querySelector("button").click();
  const down = numbers();
  const other = document.querySelector("#other-taxes");
  const filter = other.querySelector("input");
  filter.value = "LMCache Bp";
  filter.dispatchEvent(new Event("input"));
  const judged = [...document.querySelectorAll("[data-narrow]")]
    .map((cell) => cell.querySelector("b") || cell);
  const note = document.querySelector(".planned");
  const verdicts = () => judged.map((word) => word.textContent);
  const planned = verdicts();
  const margin = document.querySelector("#margin");
  const moved = [90, ""].map((value) => {
    margin.value = value;
    margin.dispatchEvent(new Event("input"));
    return [...verdicts(), note.hidden];
  });
  const height = document.documentElement.scrollHeight;
  for (const part of document.querySelectorAll("details")) part.open = true;
  const left = [...other.querySelectorAll("tbody tr")].filter((row) => !row.hidden).length;
  const axe_found = typeof axe === "undefined" ? []
    : (await axe.run()).violations.map((rule) => `${rule.id}: ${rule.nodes[0].html}`);
  parent.document.title = JSON.stringify({
    up, down, left, seen, planned, moved, height, axe: axe_found,
    markdown: markdown(table), latex: latex(table),
    wide: document.documentElement.scrollWidth - innerWidth,
    dark: matchMedia("(prefers-color-scheme: dark)").matches,
    paper: getComputedStyle(document.body).backgroundColor,
    requests: performance.getEntriesByType("resource").map((entry) => entry.name)
      .filter((name) => !name.startsWith("data:")),
  });
});
</script>"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the report of a study with every kind of table and picture."""
    root = tmp_path_factory.mktemp("browser") / "s"
    marked = {("mooncake_both", "r8"): "mooncake_both saturated"}
    design = Design(skipped={"nixl_both": "not installed"}, overloaded=marked)
    study = StudyTables(write_study(root, design, runs=True))
    for name in NAMES:
        style.save(draw(study, name), root / "figures", name)
    return render(study)


def browse(folder: Path, page: str, width: int, scheme: int, script: str = "") -> dict[str, Any]:
    """Load a page in a frame of `width` pixels; return its checks' results, save a picture."""
    held = page.replace("<head>", f"<head>{EARLY}", 1)
    held = held.replace("</body>", f"{script}{LATE}</body>", 1)
    # No closing tag of a script may stand in the script that carries the page.
    source = json.dumps(held).replace("</", "<\\/")
    around = (
        f"<!doctype html><meta charset='utf-8'><title>nothing yet</title><body style='margin:0'>"
        f"<iframe id='frame' style='border:0;width:{width}px;height:2400px'></iframe>"
        f"<script>document.getElementById('frame').srcdoc = {source};</script>"
    )
    (folder / "around.html").write_text(around, encoding="utf-8")
    command = [
        "chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        "--no-first-run", "--disable-background-networking", "--disable-component-update",
        f"--user-data-dir={folder / 'profile'}", f"--window-size={max(width, 500)},2400",
        f"--blink-settings=preferredColorScheme={scheme}", "--virtual-time-budget=20000",
        "--enable-logging=stderr",
    ]  # fmt: skip
    url = (folder / "around.html").as_uri()
    picture = folder / f"{width}-{'dark' if scheme == DARK else 'light'}.png"
    for wanted in (f"--screenshot={picture}", "--dump-dom"):
        done = subprocess.run(
            [*command, wanted, url], capture_output=True, text=True, timeout=120, check=True
        )
        assert "CONSOLE" not in done.stderr, done.stderr
    title = re.search(r"<title>(.*?)</title>", done.stdout, re.DOTALL)
    assert title is not None
    told: dict[str, Any] = json.loads(unescape(title[1]))
    return told


@pytest.mark.parametrize("width", [1400, 390])
@pytest.mark.parametrize("scheme", [DARK, LIGHT])
def test_report_loads_nothing_and_sorts_filters_copies_and_fits(
    page: str, tmp_path: Path, width: int, scheme: int
) -> None:
    told = browse(tmp_path, page, width, scheme)
    assert told["seen"] == []
    assert told["requests"] == []
    assert len(told["up"]) == 7
    assert told["up"] == sorted(told["up"])
    assert told["down"] == sorted(told["up"], reverse=True)
    assert told["left"] == 2 * 3 * 5  # two configurations with the word, shapes, metrics
    assert told["markdown"].startswith("| Configuration | ")
    assert told["markdown"].count("\n") == 10
    assert told["latex"].startswith("\\begin{tabular}{l")
    assert "Tax, \\%" in told["latex"]
    assert told["wide"] <= 0
    assert told["height"] < 8000, told["height"]
    # A margin of 90% changes the verdicts; without a margin the planned verdicts return.
    (*wide, named), (*again, hidden) = told["moved"]
    for words in ("● costs, less than 90%", "costs, less than 90%"):  # scorecard, tables
        assert words in wide
        assert words not in told["planned"]
    assert again == told["planned"]
    assert (named, hidden) == (False, True)
    assert told["dark"] == (scheme == DARK)
    assert (told["paper"] == "rgb(255, 255, 255)") == (scheme == LIGHT)


@pytest.mark.parametrize("scheme", [DARK, LIGHT])
def test_report_has_no_axe_violation(page: str, tmp_path: Path, scheme: int) -> None:
    if not AXE.is_file():
        pytest.skip(f"no {AXE.relative_to(ROOT)}: npm install --prefix build/browser axe-core")
    script = f"<script>{AXE.read_text(encoding='utf-8')}</script>"
    assert browse(tmp_path, page, 1400, scheme, script)["axe"] == []
