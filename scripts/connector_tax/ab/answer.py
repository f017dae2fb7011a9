"""Print the answer: cost, interval and verdict of each candidate, and the report's path."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from connector_tax import text
from connector_tax.ab.arguments import BASELINE
from connector_tax.ab.void_cells import all_void
from connector_tax.analysis.effect import EXACT, MOST_BLOCKS
from connector_tax.analysis.effects import FEW_REQUESTS
from connector_tax.analysis.measure import measure_requests
from connector_tax.artifacts import paths
from connector_tax.artifacts.folder import StudyFolder
from connector_tax.artifacts.metrics import (
    THROUGHPUT_METRICS,
    VERDICT_METRICS,
    change_of,
    judged_metrics,
    word_of,
)
from connector_tax.artifacts.names import ALL_RATES, configuration_of
from connector_tax.artifacts.study_file import Study
from connector_tax.artifacts.tables import RESOURCE, TAX, EffectRow, read_table
from connector_tax.artifacts.verdicts import CANNOT_TELL, MARKED, in_words
from connector_tax.compare.bounds import NO_NUMBER, STATUS, Bound, bounded, check, worst
from connector_tax.figures import compared
from connector_tax.figures.tables import StudyTables
from connector_tax.servers.command import running_url

BESIDES_LEVEL = 0.05
# Resources besides latency: name, text, unit, decimals.
BESIDES = (
    ("idle_cpu", "idle CPU", "cores", 2),
    ("memory_pss_mib", "memory", "MiB", 0),
    ("gpu_memory_mib", "GPU memory", "MiB", 0),
    ("startup_s", "start", "s", 1),
)
# Columns of effects.csv in --json for each tax.
FOUND = (
    "config", "metric", "estimate", "family_lo", "family_hi", "narrow_lo", "narrow_hi", "error",
    "df", "n_blocks", "base", "own", "verdict", "mark", "blocks_needed", "status", "reason",
)  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """The answer of a finished comparison.

    Attributes:
        tables: the study's tables, which give the commands and the latencies in ms.
        taxes: taxes over all rates, of each candidate and judged metric.
        void: the reason of each configuration that has no valid cell.
        hits: share of prompt tokens found in prefix caches, by configuration; only for a file's
            requests and a server that counts.
        single_tokens: number of measured answers without a TPOT.
    """

    study: Study
    blocks: int
    minutes: float
    taxes: Sequence[EffectRow]
    resources: Sequence[EffectRow]
    archive: Path | None
    tables: StudyTables
    void: Mapping[str, str] = field(default_factory=dict)
    hits: Mapping[str, float] = field(default_factory=dict)
    single_tokens: int = 0

    def text(self) -> str:
        """Return the answer, the latencies in ms, and the report's path."""
        table = compared.aligned(*compared.table(self.tables))
        return "\n".join([*self.lines, *table, f"report: {self.study.root / paths.REPORT}"])

    def markdown(self) -> str:
        """Return the answer with both commands and the latencies as Markdown."""
        return compared.markdown(self.tables, self.lines)

    @property
    def lines(self) -> list[str]:
        """Return two lines for each candidate, and one line on the measurement."""
        lines = []
        for name in dict.fromkeys(tax.config for tax in self.taxes):
            taxes = [tax for tax in self.taxes if tax.config == name]
            label = self.tables.label(name)
            if why := self._void(name):
                lines.append(f"{label}: no number, since every cell is void: {why}")
                continue
            lines.append(f"{label}: {'; '.join(map(self._size_and_verdict, taxes))}")
            lines.append(f"  besides: {self._besides(name)}")
        config = self.study.config
        running = "; the result applies to these processes only" if self._running else ""
        latencies = set(judged_metrics(config["statistics"])) - THROUGHPUT_METRICS.keys()
        medians = "medians" if latencies <= {*VERDICT_METRICS} else "percentiles as named"
        tolerant = config["validity"]["max_foreign_cpu"] >= 1
        shared = "; other processes were tolerated" if tolerant else ""
        load = compared.judged_load(self.tables)
        lines.append(
            f"{self.blocks} blocks in {self.minutes:.1f} min at {load}, "
            f"{config['engine']['label']}, {medians}{running}{shared}"
        )
        return [*lines, *self._of_traffic(), *self._not_measured()]

    def _not_measured(self) -> list[str]:
        """Return a line that lists what could not be measured on these servers, or no line."""
        served = self.study.config["engine"].get("served", {})
        missing = ["step times"] if served.get("no_steps") else []
        if not served.get("counters", True):
            missing.append("the server's own counters (vLLM's names), which check each cell")
        unknown = {row.metric for row in self.resources if row.difference[0] is None}
        missing += [words for name, words, *_ in BESIDES[:2] if name in unknown]
        return [f"not measured: {', '.join(missing)}"] if missing else []

    def _of_traffic(self) -> list[str]:
        """Return lines on a file's requests: repeated tokens and cache hits."""
        traffic = self.study.config["phase_a"].get("traffic")
        if traffic is None:
            return []
        lines = []
        if share := traffic["repeated_share"]:
            lines.append(
                f"{share:.0%} of the prompt tokens repeat earlier ones, so the result includes the"
                " cost and gain of reuse. --shape sends prompts without repetition."
            )
        if self.hits:
            hits = ", ".join(
                f"{self.tables.label(name)} {share:.1%}" for name, share in self.hits.items()
            )
            lines.append(f"prompt tokens found in the prefix cache: {hits}")
        if self.single_tokens:
            lines.append(f"{self.single_tokens} answers of fewer than two tokens have no TPOT")
        return lines

    @property
    def _running(self) -> bool:
        """Return whether the servers were already running."""
        commands = self.study.config["engine"]["commands"]
        return any(running_url(command) is not None for command in commands.values())

    def _size_and_verdict(self, tax: EffectRow) -> str:
        word = word_of(tax.metric)
        if tax.estimate is None:
            return f"{word} no number" + (f": {tax.reason}" if tax.reason else "")
        estimate, lo, hi = tax.change
        size = f"{text.signed(100 * (estimate or 0.0), 1)}%"
        if lo is not None and hi is not None:
            size += f" {text.interval(lo, hi)}"
        if tax.verdict == MARKED:
            few = tax.mark == FEW_REQUESTS
            why = f"a cell has {FEW_REQUESTS}" if few else "a server fell behind this rate"
            return f"{word} {size} no verdict: {why}"
        if tax.narrow_hi is not None:
            most = change_of(tax.metric, tax.narrow_hi)
            beyond = "at worst" if tax.metric in THROUGHPUT_METRICS else "at most"
            size += f", {beyond} {text.signed(100 * most, 1)}%:"
        verdict = in_words(tax.verdict, tax.margin)
        if tax.verdict != CANNOT_TELL:
            return f"{word} {size} {verdict}"
        if tax.blocks_needed is None:
            return f"{word} {size} {verdict}, over {MOST_BLOCKS} blocks would"
        minutes = self.minutes / self.blocks * tax.blocks_needed
        return f"{word} {size} {verdict}, about {math.ceil(minutes)} min would"

    def _void(self, config: str) -> str:
        """Return why the candidate, or the baseline, has no valid cell, or ""."""
        baseline = self.void.get(BASELINE)
        return self.void.get(config) or (f"{BASELINE}: {baseline}" if baseline else "")

    def _besides(self, config: str) -> str:
        """Return the significant differences in other resources (Bonferroni-corrected) as text."""
        rows = {row.metric: row for row in self._taken if row.config == config}
        known = [
            named
            for named in BESIDES
            if (row := rows.get(named[0])) and (row.p is not None or row.method == EXACT)
        ]
        differences = []
        for name, word, unit, decimals in known:
            value, p = rows[name].difference[0], rows[name].p
            # Without a p-value all launches of a side are equal: any difference counts.
            found = bool(value) if p is None else len(known) * p < BESIDES_LEVEL
            if value is not None and found:
                differences.append(f"{word} {text.signed(value, decimals)} {unit}")
        return ", ".join(differences) or ("no difference found" if known else "nothing is known")

    @property
    def _taken(self) -> list[EffectRow]:
        """Return the candidates' resources, without the start-up time if `ab` started no server."""
        names = {tax.config for tax in self.taxes}
        return [
            row for row in self.resources
            if row.config in names and not (self._running and row.metric == "startup_s")
        ]  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        """Return the answer for --json."""
        sweep = self.study.config["phase_a"]
        return {
            "study": self.study.document["study"],
            "blocks": self.blocks,
            "minutes": round(self.minutes, 2),
            "commands": self.study.config["engine"]["commands"],
            "labels": {item.id: item.label for item in self.tables.configurations},
            "engine": self.study.config["engine"]["label"],
            "measured": dict(compared.load(self.tables)),
            "rates_rps": sweep["rates_rps"],
            "concurrency": sweep.get("concurrency"),
            "goodput_ms": self.study.config["statistics"].get("goodput"),
            "shape": [sweep["input_tokens"], sweep["output_tokens"]],
            "latencies_ms": [asdict(one) for one in compared.latencies(self.tables)],
            "margin": self.study.config["statistics"]["margins"]["ttft_p50"],
            "findings": [
                {name: getattr(tax, name) for name in FOUND} for tax in self.taxes
            ],
            "resources": [
                {"config": r.config, "resource": r.metric, "unit": r.unit,
                 **dict(zip(("difference", "lo", "hi"), r.difference, strict=True))}
                for r in self._taken
            ],
            "traffic": sweep.get("traffic"),
            "prefix_hits": dict(self.hits),
            "answers_without_tpot": self.single_tokens,
            "void": dict(self.void),
            "report": str(self.study.root / paths.REPORT),
            "archive": str(self.archive) if self.archive else None,
        }  # fmt: skip

    def status(self, bounds: Sequence[Bound]) -> int:
        """Return the exit status; with bounds, compare the costs over all rates as `gate` does."""
        numbers = [tax.estimate is not None and tax.verdict != MARKED for tax in self.taxes]
        if not bounds:
            return 0 if all(numbers) else STATUS[NO_NUMBER]
        statistics = self.study.config["statistics"]
        checks = [
            check(tax, tax.config, metric, bound.most, statistics["confidence"], looked=True)
            for bound, metric in bounded(bounds, judged_metrics(statistics))
            for tax in self.taxes
            if tax.metric == metric
        ]
        return STATUS[worst([one.result for one in checks])]


def answer_of(study: Study, blocks: int, archive: Path | None) -> Answer:
    """Return the answer of an analysed study."""
    measured = StudyFolder(study)
    indexes = [la.index for la in measured.of_phase("A") if la.index is not None]
    spent_s = sum(index.timing["wall_s"] for index in indexes)
    rows = read_table(study.root / paths.ANALYSIS / paths.EFFECTS, EffectRow)
    judged = judged_metrics(study.config["statistics"])
    taxes = [
        row for row in rows
        if (row.quantity, row.cell) == (TAX, ALL_RATES) and row.metric in judged
        if configuration_of(row.config) != study.baseline
    ]  # fmt: skip
    taxes.sort(key=lambda row: judged.index(row.metric))
    resources = [row for row in rows if row.quantity == RESOURCE]
    tables = StudyTables(study.root / paths.STUDY)
    hits, single = ({}, 0) if "traffic" not in study.config["phase_a"] else _hit_shares(measured)
    return Answer(
        study, blocks, spent_s / 60, taxes, resources, archive, tables,
        all_void(measured.cells("A")), hits, single,
    )  # fmt: skip


def _hit_shares(study: StudyFolder) -> tuple[dict[str, float], int]:
    """Return the share of prompt tokens found in caches, and the answers without a TPOT."""
    hits_of: dict[str, list[float]] = {}
    single = 0
    for cell in study.cells("A"):
        if cell.status != "valid":
            continue
        requests = measure_requests(cell)
        single += requests.n - len(requests.tpot_ms)
        of = hits_of.setdefault(cell.configuration, [0.0, 0.0])
        for at, keys in enumerate((("prefix_cache_hits", "external_prefix_cache_hits"),
                                   ("prompt_tokens",))):  # fmt: skip
            of[at] += sum(map(cell.counted, keys))
    return {name: hits / tokens for name, (hits, tokens) in hits_of.items() if tokens}, single
