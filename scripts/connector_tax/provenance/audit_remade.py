"""Claims about words: the sentences of hypotheses.json and report.html are made again and compared.

What is made again is made by the study's own commands in processes of their own, from the raw
records, in a temporary folder: no code of theirs is loaded here, and nothing of the study changes.
Their numbers are recomputed elsewhere (`recompute*`).
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from connector_tax.artifacts import paths
from connector_tax.files import read_json
from connector_tax.provenance.audit_study import RawStudy
from connector_tax.provenance.claims import Ledger
from connector_tax.provenance.comparison import differences

MADE_AGAIN = (paths.ANALYSIS, paths.REPORT, paths.LOGS, paths.AUDIT, "published")
KIND = "made again"


def check_remade(study: RawStudy, ledger: Ledger) -> None:
    """Claims about hypotheses.json and report.html as a whole."""
    with tempfile.TemporaryDirectory(prefix="audit-") as folder:
        copy = Path(folder) / study.root.name
        copy.mkdir()
        for path in study.root.iterdir():
            if path.name not in MADE_AGAIN:
                (copy / path.name).symlink_to(path.resolve())
        ledger.check(KIND, "hypotheses.json", _hypotheses(study, copy), "every word as it was")
        ledger.check(KIND, "report.html", _report(study, copy), "byte for byte the same")


def _hypotheses(study: RawStudy, copy: Path) -> Iterator[str]:
    failed = _run("analysis.aggregate", copy)
    if failed:
        yield failed
        return
    name = f"{paths.ANALYSIS}/{paths.HYPOTHESES}"
    yield from differences(read_json(study.numbers / name), read_json(copy / name), "hypotheses")


def _report(study: RawStudy, copy: Path) -> Iterator[str]:
    published = study.root / paths.REPORT
    if not published.is_file():
        yield "report.html is missing"
        return
    failed = _run("report", copy)
    if failed:
        yield failed
        return
    old, new = (
        path.read_text(encoding="utf-8").splitlines() for path in (published, copy / paths.REPORT)
    )
    if old == new:
        return
    line = next((k for k, pair in enumerate(zip(old, new, strict=False)) if pair[0] != pair[1]), 0)
    yield (
        f"it is not what this code makes of the study ({len(old)} lines, made again {len(new)}), "
        f"first in line {line + 1}; an honest report that is only old is made anew by "
        f"`python -m connector_tax.report --study {study.root / 'study.json'}`"
    )


def _run(module: str, copy: Path) -> str | None:
    """Run one of the study's commands on the copy; what it says where it fails."""
    study_file = str(copy / paths.STUDY)
    command = [sys.executable, "-m", f"connector_tax.{module}", "--study", study_file]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    last = done.stderr.strip().splitlines()[-1:] or ["no message"]
    return f"python -m connector_tax.{module} ended with status {done.returncode}: {last[0]}"
