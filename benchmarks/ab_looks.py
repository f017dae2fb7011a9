"""How often `connector-tax ab` finds a cost where there is none, and what it finds where there is.

    python -m benchmarks.ab_looks [--runs 2000]

Launch medians are drawn (normal on the log scale, launches of both metrics independent, a common
shift of each block), and judged by the looks of `analysis/looks.py` as `ab` takes them: after each
block from the second on, until all is decided or the blocks are used up.
"""

import argparse
import sys
from collections import Counter

import numpy as np

from connector_tax.ab.design import FAMILY_LEVEL
from connector_tax.analysis.block_model import LaunchId
from connector_tax.analysis.looks import FIRST_LOOK, Finding, decided, findings_of
from connector_tax.artifacts.metrics import VERDICT_METRICS
from connector_tax.artifacts.verdicts import CANNOT_TELL, costs, gains
from connector_tax.machine import machine
from connector_tax.seeds import named_generator

MARGIN = 0.03
BLOCK_SD = 0.02


def one_run(
    rng: np.random.Generator, tax: float, sd: float, blocks: int, candidates: int
) -> tuple[int, list[Finding]]:
    """The blocks it took, and what the last look says."""
    names = [f"candidate{chr(97 + number)}" for number in range(candidates)]
    levels = [FAMILY_LEVEL / (blocks - 1)] * (blocks - 1)
    values: dict[str, dict[LaunchId, float]] = {metric: {} for metric in VERDICT_METRICS}
    kept: dict[str, list[Finding]] = {}
    for block in range(blocks):
        for metric in VERDICT_METRICS:
            shift = rng.normal(0, BLOCK_SD)
            for name in ("baseline", "baseline_2", *(n for n in names if n not in kept)):
                mean = shift + (0.0 if name.startswith("baseline") else np.log1p(tax))
                values[metric][LaunchId(name, block)] = float(mean + rng.normal(0, sd))
        if block + 1 >= FIRST_LOOK:
            margins = dict.fromkeys(VERDICT_METRICS, MARGIN)
            findings = findings_of(values, "baseline", names, block + 1, levels, margins)
            for name in decided(findings) - kept.keys():
                kept[name] = [finding for finding in findings if finding.config == name]
            if len(kept) == candidates:
                break
    last = [f for f in findings if f.config not in kept]
    return block + 1, [*last, *(finding for found in kept.values() for finding in found)]


def main() -> int:
    """Print a line for each tax, spread and number of blocks."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ab_looks", description=__doc__)
    parser.add_argument("--runs", type=int, default=2000)
    runs = parser.parse_args().runs
    print(machine("numpy", "scipy"))
    print(f"{runs} runs each, margin {MARGIN:.0%}; shares of runs with a verdict of any candidate")
    print("tax   sd    blocks candidates | costs  faster  cannot tell | blocks used (mean)")
    for tax in (0.0, 0.02, 0.06):
        for sd in (0.005, 0.02):
            for blocks, candidates in ((3, 1), (8, 1), (8, 3)):
                rng = named_generator(f"ab/{tax}/{sd}/{blocks}/{candidates}")
                counts: Counter[str] = Counter()
                used = 0
                for _ in range(runs):
                    taken, findings = one_run(rng, tax, sd, blocks, candidates)
                    used += taken
                    counts.update({finding.verdict for finding in findings})
                told = (costs, gains, lambda verdict: verdict == CANNOT_TELL)
                shares = [sum(n for v, n in counts.items() if is_(v)) / runs for is_ in told]
                print(f"{tax:4.0%}  {sd:4.1%}  {blocks:4d} {candidates:8d}    |"
                      f" {shares[0]:6.1%} {shares[1]:6.1%} {shares[2]:8.1%}      |"
                      f" {used / runs:5.1f}")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
