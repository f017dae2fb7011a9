"""Recompute the results of an unpacked archive from its records and compare them with the published
ones.

    mkdir X && tar --zstd -xf default.tar.zst -C X python -I provenance/verify.py X

Run the copy in a checkout, isolated (`-I`); the archive's own copy could run code from the archive.
Needs pandas and scipy. It shares no code with the analysis and is written from docs/method.md,
whose sections it names. Exits with 1 if a number differs by more than a relative 1e-8 or a text
differs, and with 2 if the folder cannot be read.
"""

import argparse
import itertools
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import optimize, special, stats

WITHIN = 1e-8
METHOD = 2  # of the intervals that this file computes
RATIOS = (2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)  # "The error model"
NOT_CHECKED = """\
Not checked: which cells are valid and why not, pooled rows, remarks, steps and machine columns of
cells.csv, blocks_needed, gaps, steps, hooks, waits, devices and resources of effects.csv,
engine.csv, step_cdf.csv, criteria and sentences of hypotheses.json, results of interim analyses
(looks.json), complete.json, manifest.json, environment, figures, pages, the chain of seals and the
hashes of files."""
Launch = tuple[str, int]  # name in its block, block
Key = tuple[str, int, str, str]  # launch name, block, phase, cell
Row = dict[str, Any]
Tax = tuple[str, str, str, str]  # launch name, phase, cell, metric
Sample = tuple[float, int]  # log of a percentile, requests
BEYOND = 5  # requests of a cell beyond a percentile; with fewer there is no verdict ("Verdicts")
COLUMNS = ["t_intended_ns", "t_first_token_ns", "t_last_token_ns", "completion_tokens"]
WAITING = "vllm:num_requests_waiting"
RATES = "all_rates"  # the cell of the taxes over all rates of Phase A without saturation


def once(pairs: list[tuple[str, Any]]) -> Row:
    """Return a JSON object; reject duplicate keys, for which readers could use different values."""
    names = Counter(name for name, _ in pairs)
    if len(names) < len(pairs):
        raise ValueError(f"key {names.most_common(1)[0][0]!r} twice in one object")
    return dict(pairs)


def parsed(text: str | bytes, where: str) -> Any:
    """Return the value of a JSON text; an error names `where` it is."""
    try:
        return json.loads(text, object_pairs_hook=once)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def read_json(path: Path) -> Any:
    """Return the value of a JSON file."""
    return parsed(path.read_bytes(), str(path))


def read_table(root: Path, kind: str) -> dict[str, list[Row]]:
    """Return the lines of each file with records of one kind, restored from the columns.

    The first line of `tables/<kind>` names files with their number of lines, and shapes of lines
    with a NUL for each number; the second has each line's shape; a column is its numbers (`=`), or
    the differences from one to the next (`+`).
    """
    head, order, *columns = (root / "tables" / kind).read_bytes().decode("latin-1").split("\n")
    header, left = parsed(head, f"tables/{kind}"), iter(columns)
    kinds = map(int, order.split())
    shapes = [shape.split("\0") for shape in header["shapes"]]
    values = [[iter(numbers(next(left))) for _ in shape[1:]] for shape in shapes]

    def line(of: int, name: str) -> Row:
        parts = zip(values[of], shapes[of][1:], strict=True)
        text = shapes[of][0] + "".join(next(value) + part for value, part in parts)
        row: Row = parsed(text.encode("latin-1"), name)
        return row

    files = once(header["files"])
    return {n: [line(of, n) for of in itertools.islice(kinds, count)] for n, count in files.items()}


def numbers(column: str) -> list[str]:
    """Return a column's numbers as text, exactly as the lines contain them."""
    values = column[1:].split()
    return [str(n) for n in itertools.accumulate(map(int, values))] if column[0] == "+" else values


def harmless(text: str) -> str:
    """Return a text with ? for each control character, since the archive may be hostile."""
    return "".join(c if c.isprintable() else "?" for c in text)


def say(text: str, end: str = "\n") -> None:
    """Print text from the archive on one line, without control characters."""
    print(harmless(text), end=end)


def waiting(values: Row) -> float:
    """Return the number of waiting requests in a scrape, summed over the server's engines."""
    return float(sum(n for key, n in values.items() if key.partition("{")[0] == WAITING))


class Cell:
    """A valid cell: successes in order of arrival, arrivals by status, waiting queue."""

    def __init__(self, record: Row, requests: Iterable[Row], metrics: Iterable[Row]) -> None:
        start, stop = (record["window"][name] for name in ("t_warmup_end_ns", "t_stop_ns"))
        self.rate, self.window_s = record["schedule"]["rate_rps"], (stop - start) / 1e9
        self.scheduled, requests = record["schedule"]["kind"] != "closed", list(requests)
        measured = [r for r in requests if start <= r["t_intended_ns"] < stop]
        self.arrivals = Counter(r["status"] for r in measured)
        ok = pd.DataFrame([r for r in measured if r["status"] == "ok"], columns=COLUMNS, dtype="i8")
        due, first, last, tokens = (ok[name] for name in COLUMNS)
        gaps, self.all = tokens - 1, pd.DataFrame({"since_s": (due - start) / 1e9})
        self.all["ttft"], self.all["e2e"] = (first - due) / 1e6, (last - due) / 1e6
        self.all["tpot"] = ((last - first) / gaps / 1e6).where(gaps > 0)
        inside = [m["values"] for m in metrics if m["ok"] and start <= m["t_ns"] < stop]
        self.waiting = float(pd.Series(map(waiting, inside), dtype=float).median())
        part = max(1, len(ok) // (2 if record["schedule"]["kind"] == "trace" else 10))
        e2e_s = self.all["e2e"] / 1e3
        growth = max(0.0, e2e_s[-part:].median() - e2e_s[:part].median()) if len(ok) else 0.0
        self.effective_rps = len(ok) / (self.window_s + growth)
        self.ratio = self.effective_rps / (len(measured) / self.window_s) if len(measured) else None
        # "Clocks, latencies, success": of a closed loop a request's share that lies in the window.
        parts = [(1.0, n) for n in tokens]
        if not self.scheduled:
            parts = [
                (max(0, min(stop, last) - max(start, sent)) / max(1, last - sent), n)
                for sent, last, n in (
                    (r["t_send_ns"], r["t_last_token_ns"], r["completion_tokens"])
                    for r in requests
                    if r["status"] == "ok"
                )
            ]
        self.per_s = {
            "requests_per_s": math.fsum(part for part, _ in parts) / self.window_s,
            "tokens_per_s": math.fsum(part * n for part, n in parts) / self.window_s,
        }

    def value(self, metric: str, limits: Row) -> tuple[float, int]:
        """Return a metric, or the inverse of a throughput, and the number of its requests.

        The metric is 0 where the cell has no such request.
        """
        if re.search(r"_p\d\d\Z", metric):
            values = self.all[metric[:-4]].dropna().to_numpy()
            point = float(np.percentile(values, int(metric[-2:]))) if len(values) else 0.0
            return point, len(values)
        all_of = len(self.all)
        good = float(all_of)
        if metric == "goodput":
            within = [self.all[latency] <= most for latency, most in limits.items()]
            good = max(float(pd.concat(within, axis=1).all(axis=1).sum()), 0.5)
        of = self.per_s.get(metric, self.per_s["requests_per_s"] * good / all_of)
        return (1 / of if of else 0.0), all_of


def configuration_of(launch: str) -> str:
    """Return a launch's configuration, such as plain for plain_2."""
    return re.sub(r"_([2-9]|1\d|20)\Z", "", launch)


class Study:
    """An unpacked archive."""

    def __init__(self, root: Path) -> None:
        self.document: Row = read_json(root / "study.json")
        self.config: Row = self.document["config"]
        self.statistics: Row = self.config["statistics"]
        self.confidence: float = self.statistics["confidence"]
        self.borrow = self.config["engine"]["kind"] != "command"  # a study of `ab`
        # A metric without a margin in the configuration has a default.
        taxes = published_taxes(root / "published/analysis").values()
        self.margins = {row["metric"]: float(row["margin"]) for row in taxes}
        self.margins |= self.statistics["margins"]
        columns = (root / "published/analysis/cells.csv").read_text().partition("\n")[0]
        self.percentiles = re.findall(r"\b(ttft|tpot|e2e)_p(\d+)_ms", columns)
        self.baseline: str = self.config.get("baseline", "plain")
        self.ids: list[str] = [entry["id"] for entry in self.document["configurations"]]
        self.planned: dict[str, list[Row]] = self.document["cells"]
        self.grid: dict[float, str] = {c["rate_rps"]: c["cell"] for c in self.planned["A"]}
        order: dict[str, list[Row]] = self.document["run_order"]
        self.names = {p: list(dict.fromkeys(e["config"] for e in order[p])) for p in order}
        self.cells: dict[Key, Cell] = {}
        tables = {kind: read_table(root, kind) for kind in ("requests", "metrics")}
        for phase in order:
            for launch, cell in itertools.product(order[phase], self.planned[phase]):
                key = (launch["config"], launch["block"], phase, cell["cell"])
                folder, tail = f"runs/{key[0]}/block{key[1]}/{phase}/{key[3]}", f"{phase}_{key[3]}"
                path = root / folder / f"cell_{tail}.json"
                if path.exists() and (record := read_json(path))["valid"]:
                    lines = [of[f"{folder}/{kind}_{tail}.jsonl"] for kind, of in tables.items()]
                    self.cells[key] = Cell(record, *lines)

    def plains(self, phase: str) -> list[str]:
        """Return the baseline's launches in a block, by number."""
        names = [name for name in self.names[phase] if configuration_of(name) == self.baseline]
        return sorted(names, key=lambda name: (len(name), name))

    def fired(self, key: Key) -> list[str]:
        """Return the saturation criteria that fire in a valid cell."""
        bounds, cell = self.config["saturation"], self.cells[key]
        if not cell.scheduled:
            return []
        half = self.cells.get((*key[:3], self.grid.get(cell.rate / 2, "")))
        growth: Any = 0.0  # there is no half of it in the grid, or nothing was served
        if key[2] == "A" and half and len(half.all):
            growth = cell.all["ttft"].quantile(0.9) / half.all["ttft"].quantile(0.9)
        hits = {
            "throughput_ratio": (cell.ratio or 1) < bounds["throughput_ratio_min"],
            "waiting": cell.waiting > bounds["waiting_p50_max"],
            "ttft_ratio": growth > bounds["ttft_p90_ratio_max"],
        }
        return [name for name, hit in hits.items() if hit]

    @cached_property
    def unsaturated(self) -> list[str]:
        """Return the Phase A cells, by rate, without saturation and dropped arrivals.

        A configuration that fails this at its lowest rate is ignored.
        """
        over: dict[str, set[str]] = {self.grid[rate]: set() for rate in sorted(self.grid)}
        for key, cell in self.cells.items():
            if key[2] == "A" and len(cell.all) and (self.fired(key) or cell.arrivals["dropped"]):
                over[key[3]].add(configuration_of(key[0]))
        broken = next(iter(over.values()), set[str]())
        return [cell for cell, configs in over.items() if not configs - broken]

    def row(self, key: Key) -> Row:
        """Return a valid cell's row of cells.csv; percentiles have order-statistic intervals."""
        cell, names, tail = self.cells[key], self.fired(key), (1 - self.confidence) / 2
        row: Row = {
            "label": self.document["engine_label"], "rate_rps": cell.rate,
            "window_s": cell.window_s,
            "n": len(cell.all), "dropped": cell.arrivals["dropped"],
            "effective_throughput_rps": cell.effective_rps,
            "throughput_ratio": cell.ratio, "waiting_p50": cell.waiting,
            "saturated": bool(names) if len(cell.all) and cell.scheduled else None,
            "saturation_criteria": ";".join(names),
        }  # fmt: skip
        for latency, percent in ((name, int(text)) for name, text in self.percentiles):
            ends: Row = dict.fromkeys(("", "_lo", "_hi"))
            x = np.sort(cell.all[latency].dropna())
            if len(x) and (percent < 99 or len(x) >= self.statistics["p99_min_samples"]):
                low, high = stats.binom.ppf([tail, 1 - tail], len(x), percent / 100).astype(int)
                ends[""] = value = float(np.percentile(x, percent))
                ends["_lo"] = min(value, x[low - 1]) if low >= 1 else None
                ends["_hi"] = max(value, x[high]) if high < len(x) else None
            row |= {f"{latency}_p{percent}{end}_ms": number for end, number in ends.items()}
        return row

    def reference_rates(self) -> Row:
        """Return reference and saturation rates, and the excluded configurations."""
        state: dict[str, dict[float, bool]] = {config: {} for config in self.ids}
        for config, (rate, at) in itertools.product(self.ids, self.grid.items()):
            here = [k for k in self.cells if (configuration_of(k[0]), *k[2:]) == (config, "A", at)]
            hits = [bool(self.fired(key)) for key in here if len(self.cells[key].all)]
            if hits:
                state[config][rate] = 2 * sum(hits) >= len(hits)
        over = {c: next((r for r, hit in of.items() if hit), None) for c, of in state.items()}
        included = [c for c, of in state.items() if not next(iter(of.values()), True)]
        rates: Row = {"saturation_rate_rps": over}
        for name, configs in (("ref_safe", included), ("ref_load", [self.baseline])):
            most = min(over[c] or math.inf for c in configs or [self.baseline])
            good = [r for r in self.grid if r < most and all(r in state[c] for c in configs)]
            none = not good or self.baseline not in included
            rates[name] = self.config["reference"]["fallback_rps"] if none else good[-1]
        return rates


def samples(study: Study) -> dict[tuple[str, ...], dict[Launch, Sample]]:
    """Return the samples of each phase, cell and metric, and those over all rates of Phase A."""
    by_quantity: dict[tuple[str, ...], dict[Launch, Sample]] = {}
    for key, cell in study.cells.items():
        for metric in study.margins if len(cell.all) else ():
            point, n = cell.value(metric, study.statistics.get("goodput", {}))
            if point > 0:  # neither 0 nor without TPOT
                by_quantity.setdefault((*key[2:], metric), {})[key[:2]] = math.log(point), n
    for metric, rates in itertools.product(study.margins, [study.unsaturated]):
        of = [by_quantity.get(("A", cell, metric), {}) for cell in rates]
        for launch in [la for la in of[0] if all(la in cell for cell in of)] if of else []:
            logs, counts = zip(*(cell[launch] for cell in of), strict=True)
            mean = sum(logs) / len(logs), sum(counts)
            by_quantity.setdefault(("A", RATES, metric), {})[launch] = mean
    return by_quantity


@dataclass(frozen=True)
class Spread:
    """A t distribution: standard error and degrees of freedom."""

    error: float
    df: float

    def half(self, confidence: float) -> float:
        """Return half the width of an interval."""
        return float(special.stdtrit(self.df, (1 + confidence) / 2)) * self.error


@cache
def models(k: int) -> tuple[Any, Any]:
    """Return each model's error ratios of k configurations, and its prior probability."""
    sets = [s for size in range(4) for s in itertools.combinations(range(k), size)]
    each = [(s, r) for s in sets for r in (RATIOS if s else (1.0,))]
    ratios = np.array([[r if c in s else 1.0 for c in range(k)] for s, r in each])
    prior = [0.15 ** len(s) * 0.85 ** (k - len(s)) / (9 if s else 1) for s, _ in each]
    return ratios, np.array(prior) / sum(prior)


@cache
def contrasts(places: tuple[tuple[int, str], ...]) -> tuple[Any, Any]:
    """Return a basis of the launches' error contrasts and their Cholesky factors by model.

    Launches are (block, configuration). Error contrasts are free of block effects and means.
    """
    block, group = (np.array(column) for column in zip(*places, strict=True))
    matrix = np.hstack([x[:, None] == np.unique(x) for x in (block, group)]).astype(float)
    u, size, _ = np.linalg.svd(matrix)
    basis = u[:, int((size > 1e-9 * size[0]).sum()) :]
    ratios, _ = models(len(set(group)))
    variances = ratios[:, np.unique(group, return_inverse=True)[1]] ** 2
    return basis, np.linalg.cholesky(np.einsum("ia,mi,ib->mab", basis, variances, basis))


class Layout:
    """The model y = block + configuration + error over launches, and the error of contrasts."""

    def __init__(self, y: Mapping[Launch, float], borrow: bool) -> None:
        self.y = y
        self.places = tuple((block, configuration_of(name)) for name, block in y)
        groups = sorted({group for _, group in self.places})
        self.number = {name: number for number, name in enumerate(groups)}
        self.own = not borrow or len(groups) < 3

    @cached_property
    def posterior(self) -> tuple[Any, Any, int]:
        """Return weight and sigma squared of each model, and degrees of freedom.

        There is no model if the residuals are only rounding errors.
        """
        block, group = (np.array(column) for column in zip(*self.places, strict=True))
        matrix = np.hstack([x[:, None] == np.unique(x) for x in (block, group)]).astype(float)
        value = np.array(list(self.y.values()))
        rank = int(np.linalg.matrix_rank(matrix, tol=1e-9))
        rest = value - matrix @ np.linalg.lstsq(matrix, value, rcond=1e-9)[0]
        df = len(value) - rank
        if not df or self.rounding(rest):
            return np.zeros(0), np.zeros(0), df
        basis, factors = contrasts(self.places)
        _, prior = models(len(self.number))
        z = np.linalg.solve(factors, (basis.T @ rest)[None, :, None])[:, :, 0]
        rss = (z**2).sum(1)
        log = np.log(prior) - df / 2 * np.log(rss)
        log -= np.log(np.diagonal(factors, axis1=1, axis2=2)).sum(1)
        weights = np.exp(log - log.max())
        return weights / weights.sum(), rss / df, df

    def rounding(self, rest: Any) -> bool:
        """Return whether residuals are only rounding errors."""
        most = max(1.0, *(abs(value) for value in self.y.values()))
        return float((rest**2).sum()) <= len(rest) * (1e-13 * most) ** 2

    def repeats(self, weights: Mapping[Launch, float]) -> bool:
        """Return whether the error of a contrast can be estimated."""
        blocks = {block for _, block in weights}
        return len(blocks) > 1 and (self.own or self.posterior[2] > 0)

    def own_spread(self, weights: Mapping[Launch, float]) -> Spread:
        """Return the t distribution of a contrast from its values in each block alone."""
        blocks = sorted({block for _, block in weights})
        sums = [sum(w * self.y[la] for la, w in weights.items() if la[1] == b) for b in blocks]
        rest = len(blocks) * (np.array(sums) - np.mean(sums))
        n = len(blocks)
        variance = 0.0 if self.rounding(rest) else float((rest**2).sum()) / (n - 1)
        return Spread(math.sqrt(variance / n), n - 1)

    def spread(self, weights: Mapping[Launch, float], wide: float, narrow: float) -> Spread:
        """Return the t distribution with the mixture's quantiles at the verdict's two levels."""
        if self.own:
            return self.own_spread(weights)
        model, variance, df = self.posterior
        if not len(model) or not any(weights.values()):
            return Spread(0.0, df)
        squares = np.zeros(len(self.number))
        for (name, _), weight in weights.items():
            squares[self.number[configuration_of(name)]] += weight**2
        kept = model > 1e-16
        errors = np.sqrt(variance[kept] * (models(len(self.number))[0][kept] ** 2 @ squares))
        levels = (1 + narrow) / 2, (1 + wide) / 2

        def beyond(log_x: float, level: float) -> float:
            tail = float(model[kept] @ special.stdtr(df, -math.exp(log_x) / errors))
            return math.log(tail / (1 - level))

        ends = []
        for level in levels:
            t = math.log(special.stdtrit(df, level))
            low, high = (t + math.log(e) + d for e, d in ((errors.min(), -1), (errors.max(), 1)))
            ends.append(math.exp(optimize.toms748(beyond, low, high, (level,), xtol=1e-14)))

        def above(log_df: float) -> float:
            low, high = special.stdtrit(math.exp(log_df), levels)
            return math.log(high / low) - math.log(ends[1] / ends[0])

        least, most = math.log(0.3), math.log(1e5)
        log_df = least if above(least) <= 0 else most
        if above(least) > 0 > above(most):
            log_df = optimize.toms748(above, least, most, xtol=1e-14)
        of = math.exp(log_df)
        return Spread(ends[1] / float(special.stdtrit(of, levels[1])), of)

    def suspect(self, launch: str) -> bool:
        """Return whether a launch's configuration is noisier with probability above a quarter."""
        model = self.posterior[0]
        ratio = models(len(self.number))[0][:, self.number[configuration_of(launch)]]
        return not self.own and len(model) > 0 and float(model @ (ratio > 1)) > 0.25


@dataclass(frozen=True)
class Effect:
    """A tax or a linear combination of taxes, at the two levels of its verdict."""

    point: float
    weights: Mapping[Launch, float]  # in d
    mark: str
    layout: Layout
    centre: float  # of the interval: d, or the point of a combination
    is_log: bool
    launch: str
    wide: float
    narrow: float

    @property
    def n_blocks(self) -> int:
        """Return the number of the effect's blocks."""
        return len({block for _, block in self.weights})

    @cached_property
    def repeats(self) -> bool:
        """Return whether the effect's error can be estimated."""
        return self.layout.repeats(self.weights)

    @cached_property
    def spread(self) -> Spread:
        """Return the effect's error and degrees of freedom."""
        return self.layout.spread(self.weights, self.wide, self.narrow)

    def around(self, half: float) -> tuple[float, float]:
        """Return the interval of half-width `half`; infinite without repeated launches."""
        if not self.repeats:
            return -math.inf, math.inf
        low, high = self.centre - half, self.centre + half
        return (math.expm1(low), math.expm1(high)) if self.is_log else (low, high)

    def ends(self, confidence: float) -> tuple[float, float]:
        """Return the effect's interval at a confidence level."""
        return self.around(self.spread.half(confidence) if self.repeats else 0.0)

    @cached_property
    def shown(self) -> tuple[float, float]:
        """Return the displayed interval, at the study's confidence or `wide` (combinations)."""
        return self.ends((1 + self.narrow) / 2)

    @property
    def lo(self) -> float:
        """Return the lower end of the displayed interval."""
        return self.shown[0]

    @property
    def hi(self) -> float:
        """Return the upper end of the displayed interval."""
        return self.shown[1]

    @cached_property
    def inner(self) -> tuple[float, float]:
        """Return the equivalence test's interval.

        For a suspect launch it is at least as wide as from the values of each block alone.
        """
        if not self.repeats:
            return self.around(0.0)
        half = self.spread.half(self.narrow)
        if self.is_log and self.layout.suspect(self.launch):
            half = max(half, self.layout.own_spread(self.weights).half(self.narrow))
        return self.around(half)

    @property
    def p(self) -> float | None:
        """Return the two-sided p-value of the contrast; None without repetition."""
        if not self.repeats:
            return None
        if not self.spread.error:
            return float(self.centre == 0)
        return float(2 * special.stdtr(self.spread.df, -abs(self.centre) / self.spread.error))

    @property
    def method(self) -> str:
        """Return the name of the error model."""
        if not self.repeats:
            return "one launch; launches not included"
        return "block differences" if self.layout.own else "mixture"

    @property
    def numbers(self) -> Row:
        """Return the effect's entry in hypotheses.json."""
        names = ("point", "lo", "hi", "method", "n_blocks", "mark")
        return {name: getattr(self, name) for name in names}


class Taxes:
    """The effects of a study."""

    def __init__(self, study: Study) -> None:
        self.study, self.samples = study, samples(study)

    def weights(self, tax: Tax, launches: Iterable[Launch]) -> dict[Launch, float]:
        """Return each launch's weight in d, over blocks that have both sides; the configuration's
        launches come first.
        """
        plain = {la for la in launches if la[0] in self.study.plains(tax[1]) and la[0] != tax[0]}
        base = {block: [la for la in plain if la[1] == block] for _, block in plain}
        config_launches = [la for la in launches if la[0] == tax[0] and la[1] in base]
        w = {la: 1 / len(config_launches) for la in config_launches}
        return w | {
            p: -1 / len(config_launches) / len(base[b]) for _, b in config_launches for p in base[b]
        }

    def effect(
        self, *terms: tuple[float, Tax], confidence: float | None = None, comparisons: int = 1
    ) -> Effect | None:
        """Return a tax (one term of weight 1) or a linear combination of taxes."""
        taxes, weight, is_log = [tax for _, tax in terms], [w for w, _ in terms], len(terms) == 1
        parts = [self.samples.get(tax[1:], {}) for tax in taxes]
        shared = [launch for launch in parts[0] if all(launch in part for part in parts)]
        each = [{block for _, block in self.weights(tax, shared)} for tax in taxes]
        used = [launch for launch in shared if launch[1] in set.intersection(*each)]
        if not used:
            return None
        contrasts = [self.weights(tax, used) for tax in taxes]
        both = list(zip(contrasts, parts, strict=True))
        d = [sum(x * part[la][0] for la, x in w.items()) for w, part in both]
        point = float(np.dot(weight, np.expm1(d)))
        scale = [1.0] if is_log else list(weight * np.exp(d))
        if len({tax[2] for tax in taxes}) > 1:  # of one configuration: z = sum of v y
            total = contrasts[0]
            y = {la: sum(v * p[la][0] for v, p in zip(scale, parts, strict=True)) for la in shared}
        else:
            y = {la: parts[0][la][0] for la in shared}
            pairs = list(zip(scale, contrasts, strict=True))
            total = {la: x for la in used if (x := sum(v * w.get(la, 0.0) for v, w in pairs))}
        marks = [m for tax, w in zip(taxes, contrasts, strict=True) for m in self.marks(tax, w)]
        level = confidence or self.study.confidence
        wide = level ** (1 / comparisons)
        centre = d[0] if is_log else point
        return Effect(point, total, "; ".join(dict.fromkeys(marks)), Layout(y, self.study.borrow),
                      centre, is_log, taxes[0][0], wide, 2 * level - 1)  # fmt: skip

    def keys(self, tax: Tax, launches: Iterable[Launch]) -> list[tuple[str, Key]]:
        """Return the cells behind a tax, each with its configuration."""
        cells = self.study.unsaturated if tax[2] == RATES else [tax[2]]
        places = [(name, (name, b, tax[1], cell)) for name, b in launches for cell in cells]
        return [(configuration_of(name), key) for name, key in places]

    def least(self, tax: Tax, launches: Iterable[Launch]) -> int:
        """Return the smallest number of requests in a cell behind a tax."""
        latency = tax[3][:-4] if re.search(r"_p\d\d\Z", tax[3]) else "ttft"
        cells = (self.study.cells[key].all for _, key in self.keys(tax, launches))
        return min(int(cell[latency].count()) for cell in cells)

    def marks(self, tax: Tax, launches: Iterable[Launch]) -> Iterable[str]:
        """Yield why a tax has no verdict: saturation, dropped arrivals, few requests."""
        keys = self.keys(tax, launches)
        for name in dict.fromkeys(name for name, _ in keys):
            config_keys = [key for configuration, key in keys if configuration == name]
            if any(self.study.fired(key) for key in config_keys):
                yield f"{name} saturated"
            if dropped := sum(self.study.cells[key].arrivals["dropped"] for key in config_keys):
                yield f"{name} dropped {dropped} arrivals"
        percent = int(tax[3][-2:]) if re.search(r"_p\d\d\Z", tax[3]) else 50
        if self.least(tax, launches) * (100 - percent) < 100 * BEYOND:
            yield "few requests"


def judged(wide: tuple[float, float], inner: tuple[float, float], margin: float) -> str:
    """Return the verdict of a tax with these intervals."""
    off = "costs" if wide[0] > 0 else "gains" if wide[1] < 0 else ""
    less = "less" if -margin <= inner[0] and inner[1] <= margin else ""
    return ", ".join(filter(None, (off, less))) or "cannot tell"


def verdict(effect: Effect, margin: float) -> str:
    """Return the verdict of a tax at its levels."""
    if effect.mark:
        return "marked"
    if not effect.repeats or effect.n_blocks < 3:
        return "too few blocks"
    return judged(effect.ends(effect.wide), effect.inner, margin)


def huber(effect: Effect, base: Sequence[str], margin: float) -> str | None:
    """Return the verdict by Huber's estimate of the block model; None without residuals."""
    launches = list(effect.layout.y)
    block, name = (np.array(column) for column in zip(*((b, n) for n, b in launches), strict=True))
    names, others = np.unique(name), [n for n in base if n != effect.launch]
    parts = [block[:, None] == np.unique(block), name[:, None] == names[1:]]
    matrix = np.hstack(parts).astype(float)
    y = np.array(list(effect.layout.y.values()))
    y, rank = y - y.mean(), int(np.linalg.matrix_rank(matrix))
    df, weight = len(y) - rank, np.ones(len(y))
    among = np.isin(names, others)
    form = (names == effect.launch) - among / max(1, among.sum())
    contrast = np.concatenate([np.zeros(len(np.unique(block))), form[1:]])
    inverse = np.linalg.pinv(matrix.T @ matrix)
    if df < 1 or not np.allclose(contrast @ inverse @ matrix.T @ matrix, contrast):
        return None
    before = np.zeros(len(y))
    for _ in range(200):
        root = np.sqrt(weight)
        beta = np.linalg.lstsq(matrix * root[:, None], y * root, rcond=None)[0]
        rest = y - matrix @ beta
        scale = float(np.median(np.abs(rest))) / 0.6745 / math.sqrt(df / len(y))
        moved, before = np.abs(matrix @ beta - before).max(), matrix @ beta
        if scale == 0 or moved <= 1e-10 * scale:
            break
        weight = np.minimum(1, 1.345 * scale / np.maximum(np.abs(rest), 1e-300))
    share = float((np.abs(rest) <= 1.345 * scale).mean())
    if scale == 0 or share == 0:
        return None
    bounded = np.clip(rest, -1.345 * scale, 1.345 * scale)
    correction = 1 + rank / len(y) * (1 - share) / share
    variance = correction**2 * float(bounded @ bounded) / df / share**2
    error = math.sqrt(variance * float(contrast @ inverse @ contrast))
    spread, d = Spread(error, df), float(contrast @ beta)
    wide, inner = (
        (math.expm1(d - half), math.expm1(d + half))
        for half in map(spread.half, (effect.wide, effect.narrow))
    )
    return judged(wide, inner, margin)


def tax_rows(study: Study, taxes: Taxes, rates: Row) -> Row:
    """Return the taxes of effects.csv by configuration, phase, cell and metric."""
    rows = Row()
    cells = [(phase, cell) for phase, planned in study.planned.items() for cell in planned]
    cells += [("A", {"cell": RATES, "rate_rps": None})]
    for (phase, cell), metric in itertools.product(cells, study.margins):
        where, plains = (phase, cell["cell"], metric), study.plains(phase)
        at = [r for r in ("ref_safe", "ref_load") if phase == "A" and rates[r] == cell["rate_rps"]]
        at = [RATES] if cell["cell"] == RATES else at
        confirmatory = any(name in [*study.statistics["confirmatory"], RATES] for name in at)
        compared = [n for n in study.names[phase] if n not in (plains[:-1] or plains)]
        alone = {name: taxes.effect((1, (name, *where))) for name in compared}
        tested = [name for name, e in alone.items()
                  if e and name != plains[-1] and e.repeats and not e.mark]  # fmt: skip
        margin, rises = study.margins[metric], 1 if re.search(r"_p\d\d\Z", metric) else -1
        for config, first in alone.items():
            row = rows[" ".join((config, *where))] = {
                "reference": {"B": "ref_safe", "Bp": "ref_load"}.get(phase, [*at, ""][0]),
                "family": "confirmatory" if confirmatory else "exploratory", "margin": margin,
                "estimate": None, "verdict": None, "n_blocks": 0,
            }  # fmt: skip
            if first is None:
                continue
            size, of = len(tested) if config in tested else 1, taxes.samples[where]
            effect = replace(first, wide=study.confidence ** (1 / size))
            tax_verdict, p = verdict(effect, margin), None
            if effect.p is not None and not effect.mark:
                p = float(-np.expm1(size * np.log1p(-min(effect.p, 1 - 1e-16))))
            config_side, base = ([(x, *of[la]) for la, x in effect.weights.items() if x * sign > 0]
                          for sign in (1, -1))  # fmt: skip
            decides = tax_verdict not in ("marked", "too few blocks")
            family = effect.ends(effect.wide) if decides else (None, None)
            known = effect.spread if effect.repeats else None
            row |= {
                "estimate": effect.point, "lo": effect.lo, "hi": effect.hi,
                "family_lo": family[0], "family_hi": family[1],
                "narrow_lo": effect.inner[0], "narrow_hi": effect.inner[1],
                "error": known and known.error, "df": known and known.df,
                "n_blocks": effect.n_blocks, "method": effect.method, "mark": effect.mark,
                "own": math.exp(rises * sum(x * log for x, log, _ in config_side)),
                "base": math.exp(-rises * sum(x * log for x, log, _ in base)),
                "n": sum(n for _, _, n in config_side), "n_base": sum(n for _, _, n in base),
                "n_cell": taxes.least((config, *where), effect.weights),
                "p": effect.p, "p_adjusted": p, "verdict": tax_verdict,
            }  # fmt: skip
            if confirmatory and decides and (other := huber(effect, plains, margin)):
                row["huber_differs"] = other != tax_verdict
    return rows


def hypotheses(study: Study, taxes: Taxes, rates: Row) -> Row:
    """Return verdict and effects of H1 to H6, as in hypotheses.json (docs/study.md)."""
    limits, safe = study.config["hypotheses"], study.grid.get(rates["ref_safe"], "")
    least, (low, high) = limits["h1_min_tax"], (pp / 100 for pp in limits["h2_gap_band_pp"])
    share, off = limits["h3_framework_share"], limits["h4_tolerance"]
    conclusions: Row = {f"H{n}": {"verdict": "cannot tell", "numbers": {}} for n in range(1, 7)}

    def at(*weights: tuple[float, str]) -> Effect | None:
        terms = [(w, (config, "A", safe, "ttft_p90")) for w, config in weights]
        return None if study.baseline in dict(weights).values() else taxes.effect(*terms)

    def tell(name: str, used: Sequence[Effect], yes: bool, no: bool, **numbers: Any) -> None:
        decides = all(effect.n_blocks > 2 and not effect.mark for effect in used)
        verdict = "supported" if yes else "refuted" if no else "cannot tell"
        conclusions[name] = {"verdict": verdict if decides else "cannot tell", "numbers": numbers}

    noop, both, nixl = "noop_connector", "mooncake_both", "nixl_both"
    cache, multi = "lmcache_only", "multi_mooncake_lmcache"
    if tax := at((1, both)):
        tell("H1", [tax], tax.lo >= least, tax.hi < least, tax_ttft_p90=tax.numbers)
    if gap := at((1, both), (-1, nixl)):
        inside, outside = low <= gap.lo and gap.hi <= high, gap.hi < low or gap.lo > high
        tell("H2", [gap], inside, outside, gap=gap.numbers)
    if tax and (split := at((1, noop), (-share, both))):
        yes, no = split.hi < 0 < tax.lo, split.lo >= 0 and tax.lo > 0
        tell("H3", [tax, split], yes, no, noop_minus_share_of_mooncake=split.numbers)
    parts = ((1, 0, 0), (1, -1, -1), (off - 1, 1, 1), (1 + off, -1, -1))
    stack, *more = (at(*zip(weights, (multi, both, cache), strict=True)) for weights in parts)
    if stack and all(more):
        excess, over, under = (effect for effect in more if effect)
        yes = stack.lo > 0 and over.lo >= 0 and under.lo >= 0
        no = stack.lo > 0 and (over.hi < 0 or under.hi < 0)
        tell("H4", [stack, over, under], yes, no, multi_minus_sum=excess.numbers)
    axes = ("input_tokens", "output_tokens")
    for name, metric, (x, y) in (("H5", "ttft_p90", axes), ("H6", "tpot_p90", axes[::-1])):
        cells = {(c[x], c[y]): (both, "B", c["cell"], metric) for c in study.planned["B"]}
        lengths, others = (sorted({shape[axis] for shape in cells}) for axis in (0, 1))
        steps = list(itertools.pairwise(lengths))
        if study.baseline == both or not steps:
            continue
        changes, alone = [], ((lengths[0], lengths[-1]), 1)  # whole; steps, alone and corrected
        for (a, b), among in (alone, *itertools.product(steps, (1, len(steps)))):
            ends = itertools.product(((b, 1 / len(others)), (a, -1 / len(others))), others)
            terms = [(weight, cells[length, other]) for (length, weight), other in ends]
            changes.append(taxes.effect(*terms, confidence=1 - (1 - study.confidence) / among))
        known = [effect for effect in changes if effect]
        if len(known) == len(changes):
            whole, grows, falls = known[0], known[1::2], known[2::2]
            yes = all(e.lo > 0 for e in grows)
            no = not yes and (any(e.hi < 0 for e in falls) or whole.hi < study.margins[metric])
            numbers = [e.numbers for e in (whole, *grows)]
            tell(name, [whole, *grows], yes, no, whole=numbers[0], steps=numbers[1:])
    return conclusions


NAMES = ("mooncake", "nixl", "lmcache", "no-op", "producer", "consumer")


def named(text: str) -> list[str]:
    """Return the connectors and roles that a label, an id or a command names."""
    lower = text.lower().replace("noop", "no-op")
    return [name for name in NAMES if name in lower]


def by_id(record: Row) -> Row:
    """Return the configurations of a record by their ids."""
    return {entry["id"]: entry for entry in record["configurations"]}


def texts(record: Row) -> Row:
    """Return a record with each value as JSON text."""
    return {name: json.dumps(value, sort_keys=True) for name, value in record.items()}


def identity(study: Study, root: Path) -> tuple[Row, Row]:
    """Compare study.json with the launches' commands and the first seal."""
    document, label = study.document, study.document["engine_label"]
    seal = parsed((root / "seals.jsonl").read_text().partition("\n")[0], "seals.jsonl")
    labels = {entry["id"]: entry["label"] for entry in document["configurations"]}
    settings = {name: study.config[name] for name in seal["settings"]}
    recorded: Row = {"settings": texts(settings), "configurations": texts(by_id(document))}
    again: Row = {"settings": texts(seal["settings"]), "configurations": texts(by_id(seal))}
    for path in sorted(root.glob("runs/*/*/*/launch.sh")):
        script, place = path.read_text(), str(path.parent.relative_to(root / "runs"))
        of = re.search(r"^# .* of study \S+ \((.*)\)$", script, re.MULTILINE)
        command = script.strip().rpartition("\n")[2]
        launched = re.findall(r"--configuration (\S+)", command)
        launched += re.findall(r'"kv_connector":\s*"(\w+)"', command)
        launched += re.findall(r'"kv_role":\s*"kv_(\w+)"', command)[:1]
        engine = re.search(r"connector[-_]tax[. ]engine", command)
        emulated = engine is not None or "CONNECTOR_TAX_DEVICE_TIME" in script
        name = configuration_of(path.parts[-4])
        recorded[place] = {"names": named(labels[name]), "engine": label,
                       "emulated": "emulated" in label}  # fmt: skip
        again[place] = {"names": named(" ".join(launched)), "engine": of[1] if of else "no label",
                        "emulated": emulated}  # fmt: skip
    return recorded, again


def read_csv(path: Path, *keys: str) -> Row:
    """Return the rows of a CSV, as text, by their keys."""
    rows = pd.read_csv(path, dtype=str, keep_default_na=False).to_dict("records")
    return {" ".join(row[key] for key in keys): row for row in rows}


def published_taxes(folder: Path) -> Row:
    """Return the rows of effects.csv that are taxes."""
    rows = read_csv(folder / "effects.csv", "quantity", "config", "phase", "cell", "metric", "item")
    of = ("config", "phase", "cell", "metric")
    taxes = [row for row in rows.values() if row["quantity"] == "tax"]
    return {" ".join(row[key] for key in of): row for row in taxes}


def judged_early(root: Path) -> set[str]:
    """Return the taxes that interim analyses judged; effects.csv has their numbers."""
    path = root / "looks.json"
    taken = read_json(path)[-1:] if path.exists() else []
    findings = [finding for look in taken for finding in look["findings"]]
    return {" ".join((one["config"], "A", RATES, one["metric"])) for one in findings}


def flat(where: str, value: Any) -> Row:
    """Return the values inside nested records and lists, by their path."""
    if not isinstance(value, dict | list):
        return {where: value}
    parts = value.items() if isinstance(value, dict) else enumerate(value)
    return {k: v for name, part in parts for k, v in flat(f"{where} {name}", part).items()}


def same(published: Any, again: Any) -> bool:
    """Return whether a published value, or its text in a CSV, equals the recomputed value."""
    if again in (None, "", -math.inf, math.inf) or published in (None, ""):
        return published in (None, "") and again in (None, "", -math.inf, math.inf)
    if isinstance(again, str | bool):
        return str(published).lower() == str(again).lower()
    number = float(pd.to_numeric(published, errors="coerce"))
    return math.isclose(number, again, rel_tol=WITHIN, abs_tol=1e-12)


def shown(row: Row) -> str:
    """Return text such as `+12.34% [+10.12, +14.56]`."""
    ends = [row.get(name) for name in ("estimate", "lo", "hi")]
    tax, lo, hi = (math.nan if end in (None, "") else 100 * float(end) for end in ends)
    return f"{tax:+.2f}% [{lo:+.2f}, {hi:+.2f}]"


def verify(root: Path) -> int:
    """Compare all values, print the result, and return the exit status.

    1: values differ; 2: only values of another method than this file's differ.
    """
    study, folder = Study(root), root / "published/analysis"
    rates, taxes = study.reference_rates(), Taxes(study)
    cells = read_csv(folder / "cells.csv", "status", "config", "block", "phase", "cell")
    hypothesis_entries = read_json(folder / "hypotheses.json")["hypotheses"]
    measured, launched = identity(study, root)
    published: Row = {
        "study.json": measured,
        "reference_rates.json": read_json(root / "reference_rates.json"),
        "cells": {k: row for k, row in cells.items() if re.match(r"valid \S+ \d", k)},
        "taxes": published_taxes(folder),
        "hypotheses.json": {entry["id"]: entry for entry in hypothesis_entries},
    }
    again: Row = {
        "study.json": launched,
        "reference_rates.json": rates,
        "cells": {" ".join(map(str, ("valid", *k))): study.row(k) for k in study.cells},
        "taxes": tax_rows(study, taxes, rates),
        "hypotheses.json": hypotheses(study, taxes, rates),
    }
    for tax in judged_early(root):
        published["taxes"].pop(tax, None)
        again["taxes"].pop(tax, None)
    for name in ("cells", "taxes"):
        extra = set(published[name]) - set(again[name])
        again[name] |= {key: {"row": "not in the records"} for key in extra}
    listed, recomputed = flat("", published), flat("", again)
    differ = [place for place, value in recomputed.items() if not same(listed.get(place), value)]

    def state(place: str) -> str:
        return "DIFFERS" if any(where.startswith(f" {place} ") for where in differ) else "ok"

    different = ("ref_safe", "ref_load")[: len({rates["ref_safe"], rates["ref_load"]})]
    for reference, metric in itertools.product((RATES, *different), study.margins):
        at = f" ({rates[reference]:g}/s)" if reference in rates else ""
        print()
        say(f"{metric} at {reference}{at}: published, recomputed, equal")
        for key, row in published["taxes"].items():
            if (row["reference"], row["phase"], row["metric"]) == (reference, "A", metric):
                recomputed_tax, equal = again["taxes"].get(key, {}), state(f"taxes {key}")
                say(f"{row['config']:23}{shown(row):27}{row['verdict'][:13]:14}", end="")
                say(f"{shown(recomputed_tax):27}{equal}")
    print("\nhypotheses: published, recomputed")
    for name, entry in again["hypotheses.json"].items():
        verdict = published["hypotheses.json"].get(name, {}).get("verdict", "nothing")
        say(f"{name:23}{verdict:42}{entry['verdict']:27}{state(f'hypotheses.json {name}')}")
    manifest = read_json(root / "manifest.json")
    method = manifest["method"] if isinstance(manifest, dict) else 1  # older ones have no method
    others: list[str] = []
    if method != METHOD:
        others = [p for p in differ if p.startswith((" taxes ", " hypotheses.json "))]
        differ = [place for place in differ if place not in {*others}]
        say(f"analysed by method {method}, but this file computes method {METHOD}. For that or")
        say(f"another reason, {len(others)} values of taxes and hypotheses differ.")
        say("replot compares the verdicts.")
    for place in differ:
        say(f"DIFFERS{place}: published {listed.get(place)}, recomputed {recomputed[place]}")
    print(f"\n{len(recomputed):,} values, {len(differ)} differ.\n{NOT_CHECKED}")
    return 1 if differ else 2 * bool(others)


def main() -> int:
    """Verify the folder of an unpacked archive."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path(__file__).resolve().parent)
    root = parser.parse_args().folder
    try:
        for name in ("study.json", "reference_rates.json", "tables", "published/analysis"):
            if not (root / name).exists():
                parser.exit(2, f"{root} is not an unpacked archive: {name} is missing\n")
        return verify(root)
    except (OSError, LookupError, RuntimeError, StopIteration, TypeError, ValueError) as error:
        reason = harmless(f"{type(error).__name__}: {error}")
        parser.exit(2, f"{root}: a file is damaged or missing: {reason}\n")


if __name__ == "__main__":
    sys.exit(main())
