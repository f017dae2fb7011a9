"""What the shipped archives' published verdicts are by today's method, and which change.

    python -m benchmarks.replay_verdicts

Unpacks each archive of release 0.2 into a temporary folder, makes the tables again, and sets the
verdict of every tax beside the published one (docs/decisions/error-model.md).
"""

import argparse
import csv
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from connector_tax.analysis.aggregate import write_tables
from connector_tax.artifacts import paths
from connector_tax.artifacts.study_file import load_study
from connector_tax.artifacts.table_reader import read_table
from connector_tax.artifacts.tables import TAX, EffectRow
from connector_tax.artifacts.verdicts import costs, in_words, less, verdict_of
from connector_tax.config import ROOT
from connector_tax.provenance.archive import unpack
from connector_tax.text import percent, tax

ARCHIVES = ("vllm-cpu", "default")
DEFAULT_MARGIN = 0.03
# A published verdict and what says as much of today's.
SAME: Mapping[str, Callable[[str], bool]] = {
    "TAX": costs,
    "NO TAX": less,
    "INCONCLUSIVE": lambda said: said == "cannot tell",
    "no verdict (marked)": lambda said: said == "marked",
    "point estimate, no verdict": lambda said: said == "too few blocks",
}


def replay(name: str, root: Path) -> None:
    """Print the verdicts of one archive, published and today's."""
    unpack(ROOT / f"results/archive/{name}.tar.zst", root)
    with (root / "published" / paths.ANALYSIS / "taxes.csv").open(newline="") as stream:
        published = {tuple(r[k] for k in KEY): r for r in csv.DictReader(stream)}
    write_tables(load_study(root / paths.STUDY))
    rows = [r for r in read_table(root / paths.ANALYSIS / paths.EFFECTS, EffectRow)
            if r.quantity == TAX and r.estimate is not None]  # fmt: skip
    both = [(published[key], r) for r in rows if (key := tuple(getattr(r, k) for k in KEY))
            in published and not r.config.startswith("plain")]  # fmt: skip
    print(f"\n{name}: taxes in cells, published and by today's method")
    counts = Counter((was["verdict"], now.verdict) for was, now in both)
    for (was, now), count in sorted(counts.items()):
        print(f"  {was:26} {now:14} {count:4}{'' if SAME[was](now) else '  changed'}")
    for which, some in (("at ref_safe and ref_load", True), ("in all cells", False)):
        none = [(w, n) for w, n in both if w["verdict"] == "NO TAX" and (n.reference or not some)
                and (not some or n.phase == "A")]  # fmt: skip
        kept = sum(max(map(abs, _ends(was))) < DEFAULT_MARGIN for was, _ in none)
        print(f"  {which}: {len(none)} NO TAX, {kept} of them at a margin of 3%")
    print("  changed, at ref_safe or ref_load of Phase A:")
    for was, row in both:
        if row.phase == "A" and row.reference and not SAME[was["verdict"]](row.verdict):
            print(f"  | {row.config} | {row.metric} | {row.cell} | {was['verdict']} "
                  f"{tax(float(was['tax']), *_ends(was))} | "
                  f"{was['interval_method'].split(' (')[0]} | {in_words(row.verdict, row.margin)} "
                  f"{tax(*row.shown)}, 90% to {percent(row.narrow_hi)} "
                  f"| {_p(was)}, {_p(vars(row))} |")  # fmt: skip
    print("  over all rates, at the configured margin and at 3%:")
    for row in rows:
        if row.reference == "all_rates" and row.family_lo is not None:
            assert row.family_hi is not None
            assert row.narrow_lo is not None
            assert row.narrow_hi is not None
            ends, narrow = (row.family_lo, row.family_hi), (row.narrow_lo, row.narrow_hi)
            at = verdict_of(ends, narrow, DEFAULT_MARGIN)
            print(f"  | {row.config} | {row.metric} | {tax(*row.shown)} | "
                  f"{percent(row.narrow_hi)} | {in_words(row.verdict, row.margin)} | "
                  f"{in_words(at, DEFAULT_MARGIN)} |")  # fmt: skip


KEY = ("config", "phase", "cell", "metric")


def _ends(row: dict[str, str]) -> tuple[float, float]:
    return float(row["tax_lo"] or "-inf"), float(row["tax_hi"] or "inf")


def _p(row: dict[str, str]) -> str:
    return f"p {float(row['p_adjusted']):.3f}" if row["p_adjusted"] else "no p"


def main() -> int:
    """Print what becomes of the published verdicts."""
    argparse.ArgumentParser(description=main.__doc__).parse_args()
    with tempfile.TemporaryDirectory(prefix="replay-") as folder:
        for name in ARCHIVES:
            replay(name, Path(folder) / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
