"""What was found, in three lines: cost, interval and verdict of each candidate, and the report."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from connector_tax import text
from connector_tax.analysis.block_model import MOST_BLOCKS
from connector_tax.artifacts import paths
from connector_tax.artifacts.index import read_index
from connector_tax.artifacts.looks import Finding
from connector_tax.artifacts.study_file import Study, launches
from connector_tax.artifacts.table_reader import read_table
from connector_tax.artifacts.tables import RESOURCE, EffectRow
from connector_tax.artifacts.verdicts import CANNOT_TELL, MARKED, in_words
from connector_tax.compare.gate import NO_NUMBER, STATUS, WORST_FIRST, where
from connector_tax.servers.command import running_port

WORDS = {"ttft_p50": "TTFT", "tpot_p50": "TPOT"}
# What a server takes besides latency: the resource, its words, its unit, decimals.
BESIDES = (
    ("idle_cpu", "idle CPU", "cores", 2),
    ("memory_pss_mib", "memory", "MiB", 0),
    ("gpu_memory_mib", "GPU memory", "MiB", 0),
    ("startup_s", "start", "s", 1),
)


@dataclass(frozen=True)
class Answer:
    """The answer of a finished comparison."""

    study: Study
    blocks: int
    minutes: float
    findings: Sequence[Finding]
    resources: Sequence[EffectRow]
    archive: Path | None

    def text(self) -> str:
        """Two lines for each candidate, one for how it was measured, and the report's path."""
        lines = []
        for name in dict.fromkeys(finding.config for finding in self.findings):
            mine = [finding for finding in self.findings if finding.config == name]
            lines.append(f"{name}: {'; '.join(map(self._said, mine))}")
            lines.append(f"  besides: {', '.join(self._besides(name)) or 'nothing is known'}")
        config, sweep = self.study.config, self.study.config["phase_a"]
        rates = ", ".join(f"{rate:g}" for rate in sweep["rates_rps"])
        shape = f"{sweep['input_tokens']}x{sweep['output_tokens']}"
        running = "; it says something of these processes only" if self._running else ""
        tolerant = config["validity"]["max_foreign_cpu"] >= 1
        shared = "; other processes were tolerated" if tolerant else ""
        lines.append(
            f"{self.blocks} blocks in {self.minutes:.1f} min at {rates} requests/s of {shape}, "
            f"{config['engine']['label']}, medians{running}{shared}"
        )
        return "\n".join([*lines, f"report: {self.study.root / paths.REPORT}"])

    @property
    def _running(self) -> bool:
        """Whether the servers ran already."""
        commands = self.study.config["engine"]["commands"]
        return any(running_port(command) is not None for command in commands.values())

    def _said(self, finding: Finding) -> str:
        word, margin = WORDS[finding.metric], self.study.config["statistics"]["margins"]
        if finding.tax is None:
            return f"{word} {finding.verdict}"
        size = f"{text.signed(100 * finding.tax, 1)}%"
        if finding.lo is not None:
            size += f" {text.interval(finding.lo, finding.hi)}"
        if finding.verdict == MARKED:
            return f"{word} {size} no verdict: a server fell behind this rate"
        if finding.narrow_hi is not None:
            size += f", at most {text.signed(100 * finding.narrow_hi, 1)}%:"
        said = in_words(finding.verdict, margin[finding.metric])
        if finding.verdict != CANNOT_TELL:
            return f"{word} {size} {said}"
        if finding.blocks_needed is None:
            return f"{word} {size} {said}, over {MOST_BLOCKS} blocks would"
        minutes = self.minutes / self.blocks * finding.blocks_needed
        return f"{word} {size} {said}, about {math.ceil(minutes)} min would"

    def _besides(self, config: str) -> list[str]:
        found = []
        for name, word, unit, decimals in BESIDES:
            if self._running and name == "startup_s":
                continue
            row = next((r for r in self.resources if (r.config, r.metric) == (config, name)), None)
            if row is not None and (difference := row.difference[0]) is not None:
                found.append(f"{word} {text.signed(difference, decimals)} {unit}")
        return found

    def as_dict(self) -> dict[str, Any]:
        """The answer for a program."""
        taken = [row for row in self.resources if row.config in {f.config for f in self.findings}]
        return {
            "study": self.study.document["study"],
            "blocks": self.blocks,
            "minutes": round(self.minutes, 2),
            "rates_rps": self.study.config["phase_a"]["rates_rps"],
            "margin": self.study.config["statistics"]["margins"]["ttft_p50"],
            "findings": [asdict(finding) for finding in self.findings],
            "resources": [
                {"config": r.config, "resource": r.metric, "unit": r.unit,
                 **dict(zip(("difference", "lo", "hi"), r.difference, strict=True))}
                for r in taken
            ],
            "report": str(self.study.root / paths.REPORT),
            "archive": str(self.archive) if self.archive else None,
        }  # fmt: skip

    def status(self, bound: float | None) -> int:
        """The exit status: `gate`'s where a bound is given."""
        results = [self._result(finding, bound) for finding in self.findings]
        worst = next(result for result in WORST_FIRST if result in results)
        if bound is None:
            return STATUS[NO_NUMBER] if worst == NO_NUMBER else 0
        return STATUS[worst]

    def _result(self, finding: Finding, bound: float | None) -> str:
        if finding.tax is None or finding.verdict == MARKED:
            return NO_NUMBER
        if finding.lo is None or finding.hi is None:
            return CANNOT_TELL
        return where(bound or 0.0, finding.lo, finding.hi)


def answer_of(
    study: Study, blocks: int, findings: Sequence[Finding], archive: Path | None
) -> Answer:
    """The answer, what the servers took read from the analysed study."""
    indexes = (read_index(launch.folder(study.root)) for launch in launches(study.document, "A"))
    spent_s = sum(index.timing["wall_s"] for index in indexes if index is not None)
    rows = read_table(study.root / paths.ANALYSIS / paths.EFFECTS, EffectRow)
    resources = [row for row in rows if row.quantity == RESOURCE]
    return Answer(study, blocks, spent_s / 60, findings, resources, archive)
