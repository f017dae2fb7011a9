"""Effects: percentiles of a configuration over plain's, and combinations of such taxes, with
intervals.

Source: design, "Substrate tax definition"; METHOD.md, "The unit of replication is the server
launch". tax = exp(mean over blocks of log(p_X / p_plain)) - 1, paired by block. Differences and
other linear combinations of taxes (amplification, H2 to H6) are made on the same resamples, so
that what they share, plain above all, cancels as it does in the estimate.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from connector_tax.analysis.bootstrap import (
    MIN_BLOCKS_FOR_VERDICT,
    Floats,
    Interval,
    block_draws,
    chunk_counts,
    chunk_labels,
    hierarchical_mean,
    interval,
    resampled_percentiles,
)
from connector_tax.analysis.ingest import Cell, CellKey, Study
from connector_tax.analysis.measure import Requests
from connector_tax.seeds import named_generator

METRICS = {
    "ttft_p90": ("ttft_ms", 90),
    "tpot_p90": ("tpot_ms", 90),
    "ttft_p50": ("ttft_ms", 50),
    "tpot_p50": ("tpot_ms", 50),
    "e2e_p90": ("e2e_ms", 90),
}


class LogSample(NamedTuple):
    """One percentile (ms) of one launch's cell: its log, its resamples' logs, the sample size."""

    point: float
    replicates: Floats
    n: int


class Term(NamedTuple):
    """One tax in a linear combination of taxes."""

    weight: float
    config: str
    phase: str
    cell: str
    metric: str


@dataclass(frozen=True)
class Effect:
    """An estimate in fractions (0.45 is +45%) with its interval; None bounds: unknown."""

    point: float
    interval: Interval
    n_blocks: int

    @property
    def lo(self) -> float:
        """Lower bound; minus infinity when unknown."""
        return -np.inf if self.interval.lo is None else self.interval.lo

    @property
    def hi(self) -> float:
        """Upper bound; infinity when unknown."""
        return np.inf if self.interval.hi is None else self.interval.hi

    @property
    def decides(self) -> bool:
        """Whether there are enough blocks for a verdict."""
        return self.n_blocks >= MIN_BLOCKS_FOR_VERDICT


def sample_launch(
    requests: Requests, statistics: Mapping[str, Any], seed: int, key: CellKey
) -> dict[str, LogSample]:
    """Every metric of one valid cell with its within-launch resamples.

    All metrics share one draw of chunks, and so do the configurations of a block: they were sent
    the same arrivals (`study.cell.prepare`), and what a burst does to both cancels in their ratio.
    Windows of unequal length are drawn apart. Metrics without data (TPOT of one output token) are
    absent.
    """
    if requests.n == 0:
        return {}
    labels = chunk_labels(requests.since_warmup_s, requests.window_s, statistics["chunk_s"])
    rng = named_generator(f"{seed}/bootstrap/block{key.block}/{key.phase}/{key.cell}")
    counts = chunk_counts(int(labels.max()) + 1, statistics["resamples"], rng)
    samples = {}
    for column in dict.fromkeys(column for column, _ in METRICS.values()):
        values = getattr(requests, column)
        if len(values) == 0:
            continue
        wanted = {metric: p for metric, (name, p) in METRICS.items() if name == column}
        drawn = resampled_percentiles(values, labels, counts, list(wanted.values()))
        for (metric, percent), replicates in zip(wanted.items(), drawn, strict=True):
            point = float(np.log(np.percentile(values, percent)))
            samples[metric] = LogSample(point, np.log(replicates), len(values))
    return samples


class TaxTable:
    """The samples of every valid cell of a study, and the effects that can be formed from them."""

    def __init__(
        self, study: Study, cells: Sequence[Cell], samples: Mapping[CellKey, dict[str, LogSample]]
    ) -> None:
        self._statistics = study.config["statistics"]
        self._seed = study.seed
        self._cells = {cell.key: cell for cell in cells}
        self._samples = samples
        self._blocks = range(study.document["blocks"])
        self._draws: dict[int, Any] = {}

    def blocks(self, config: str, phase: str, cell: str, metric: str) -> tuple[int, ...]:
        """The blocks in which the configuration and plain both have a valid cell."""
        return tuple(
            block
            for block in self._blocks
            if metric in self._samples.get(CellKey(config, block, phase, cell), {})
            and metric in self._samples.get(CellKey("plain", block, phase, cell), {})
        )

    def tax(self, config: str, phase: str, cell: str, metric: str) -> Effect | None:
        """The tax with its interval, both formed on the log ratio; None without a paired block."""
        blocks = self.blocks(config, phase, cell, metric)
        if not blocks:
            return None
        points, replicates = self._log_ratios(blocks, config, phase, cell, metric)
        mean = float(points.mean())
        found = interval(
            mean, points, self._mean(points, replicates), self._statistics["confidence"]
        )
        bounds = [None if b is None else float(np.expm1(b)) for b in (found.lo, found.hi)]
        return Effect(
            float(np.expm1(mean)), found._replace(lo=bounds[0], hi=bounds[1]), len(blocks)
        )

    def common_blocks(self, terms: Sequence[Term]) -> tuple[int, ...]:
        """The blocks in which every tax of a combination has a number."""
        shared = [set(self.blocks(*term[1:])) for term in terms]
        return tuple(sorted(set.intersection(*shared)))

    def point(self, term: Term, blocks: Sequence[int]) -> float:
        """The tax of a term, its weight aside, over the given blocks."""
        return float(np.expm1(self._log_ratios(blocks, *term[1:])[0].mean()))

    def combination(self, terms: Sequence[Term], confidence: float | None = None) -> Effect | None:
        """A linear combination of taxes, over the blocks all of them have; None without any."""
        blocks = self.common_blocks(terms)
        if not blocks:
            return None
        point, per_block = 0.0, np.zeros(len(blocks))
        replicates = np.zeros(self._statistics["resamples"])
        for weight, *where in terms:
            points, resampled = self._log_ratios(blocks, *where)
            point += weight * float(np.expm1(points.mean()))
            per_block += weight * np.expm1(points)
            replicates += weight * np.expm1(self._mean(points, resampled))
        level = self._statistics["confidence"] if confidence is None else confidence
        return Effect(point, interval(point, per_block, replicates, level), len(blocks))

    def sample_sizes(self, config: str, phase: str, cell: str, metric: str) -> tuple[int, int]:
        """Requests behind the tax over its paired blocks: the configuration's and plain's."""
        blocks = self.blocks(config, phase, cell, metric)
        ours, plain = (
            sum(self._samples[CellKey(name, b, phase, cell)][metric].n for b in blocks)
            for name in (config, "plain")
        )
        return ours, plain

    def difference_ms(
        self, config: str, phase: str, cell: str, metric: str
    ) -> tuple[float, float, Interval]:
        """(plain_ms, config_ms, Interval of their difference): geometric block means."""
        blocks = self.blocks(config, phase, cell, metric)
        ours, ours_resampled = self._logs(blocks, config, phase, cell, metric)
        plain, plain_resampled = self._logs(blocks, "plain", phase, cell, metric)
        config_ms, plain_ms = (float(np.exp(logs.mean())) for logs in (ours, plain))
        resampled = np.exp(self._mean(ours, ours_resampled)) - np.exp(
            self._mean(plain, plain_resampled)
        )
        found = interval(
            config_ms - plain_ms,
            np.exp(ours) - np.exp(plain),
            resampled,
            self._statistics["confidence"],
        )
        return plain_ms, config_ms, found

    def lost(self, config: str, phase: str, cell: str, metric: str) -> list[tuple[str, int, str]]:
        """(status, block, reason) of every block in which the tax has no number, in block order."""
        found: list[tuple[str, int, str]] = []
        for block in self._blocks:
            for name in (config, "plain"):
                key = CellKey(name, block, phase, cell)
                state = self._cells.get(key)
                if metric in self._samples.get(key, {}):
                    continue
                status, reason = _why_lost(state, metric)
                who = f"{name}: " if name != config else ""
                found.append((status, block, f"{who}{reason}"))
                break
        return found

    def _logs(self, blocks: Sequence[int], *where: str) -> tuple[Floats, Floats]:
        config, phase, cell, metric = where
        samples = [self._samples[CellKey(config, b, phase, cell)][metric] for b in blocks]
        return (
            np.array([sample.point for sample in samples]),
            np.array([sample.replicates for sample in samples]),
        )

    def _log_ratios(self, blocks: Sequence[int], *where: str) -> tuple[Floats, Floats]:
        config, *rest = where
        ours, plain = self._logs(blocks, config, *rest), self._logs(blocks, "plain", *rest)
        return ours[0] - plain[0], ours[1] - plain[1]

    def _mean(self, points: Floats, replicates: Floats) -> Floats:
        n, resamples = replicates.shape
        if n not in self._draws:
            rng = named_generator(f"{self._seed}/bootstrap/{n} blocks")
            self._draws[n] = block_draws(n, resamples, rng)
        return hierarchical_mean(points, replicates, self._draws[n])


def _why_lost(state: Cell | None, metric: str) -> tuple[str, str]:
    if state is None:
        return "missing", "the launch is not part of the design"
    if state.status == "valid":
        return "missing", f"no {metric} in a cell of {state.output_tokens} output tokens"
    if state.status == "failed":
        return "missing", f"the launch failed: {state.reason}"
    return state.status, str(state.reason)
