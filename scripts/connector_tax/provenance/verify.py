"""Compute the results of an unpacked study again from its records, beside the published ones.

    mkdir X && tar --zstd -xf default.tar.zst -C X && python X/verify.py X

Needs pandas, pyarrow and scipy. It shares no code with the analysis: it is written from
docs/method.md, whose sections it names. It ends with 1 where a number is further from the published
one than 1e-8 of it (p_adjusted: see P_ADJUSTED_WITHIN), and with 2 where it cannot read the folder.
"""

import argparse
import csv
import hashlib
import itertools
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy import stats
from scipy.special import ndtr

WITHIN = 1e-8
# The published integral of Dunnett's p is a sum over 96 x 96 points and off by up to 1.3e-5; the one
# below is right to 1e-12. Verdicts, which are read off p_adjusted < 0.05, must be equal.
P_ADJUSTED_WITHIN = 2e-5
NOT_CHECKED = """Not checked: which cells are valid, pooled rows and machine columns of aggregate.csv,
amplification, steps, hooks, resources, criteria, sentences, reasons, figures, seals."""
METRICS = ("ttft_p90", "tpot_p90", "ttft_p50", "tpot_p50", "e2e_p90")
SUPPORTED, REFUTED, CANNOT_TELL = "supported", "refuted", "cannot tell"

Launch = tuple[str, int]  # name in its block, block
Key = tuple[str, int, str, str]  # launch name, block, phase, cell
Row = dict[str, Any]
Rows = dict[tuple[str, ...], Row]
Rule = Callable[..., bool]


# ---- Records: "Clocks, latencies, success", "Validity and quiet time"


def read_table(root: Path, kind: str, wanted: str) -> dict[str, pd.DataFrame]:
    """The lines of each file of a kind, with the values whose names match.

    A row is a line of a JSON-lines file. A column is `name:mark`, and the mark says how its values
    are stored: `i`, `b`, `s` as they are, `j` as JSON, `d` minus that of the line before, `c` (a
    stamp) minus the stamp before it in the line, `r3` times 1000, or in `e` where that is not exact.
    """
    frame = pd.read_parquet(root / "tables" / f"{kind}.parquet")
    values: Row = {"file": frame["file"]}
    stamp: Any = 0
    for column in frame.columns:
        name, _, mark = column.rpartition(":")
        if not re.fullmatch(wanted, name):
            continue
        value: Any = frame[column]
        if mark[0] in "re":
            value = value / 10 ** int(mark[1:] or 0)
            value = values[name].fillna(value) if name in values else value
        elif mark == "d":
            value = stamp = frame.groupby("file", sort=False)[column].cumsum()
        elif mark == "c":
            value = stamp = stamp + value.fillna(0).astype(np.int64)
        values[name] = value
    return {str(name): lines for name, lines in pd.DataFrame(values).groupby("file", sort=False)}


def undisturbed(lines: Any, rule: Row, starts: Any, ends: Any) -> Any:
    """Which spans, ends included, lie within the watched chunks and in no disturbed one."""
    begin, chunks = lines[lines["kind"] == "begin"].iloc[0], lines[lines["kind"] == "chunk"]
    edges = np.array([begin["t_ns"], *chunks["t_ns"]])
    totals = [json.loads(text) for text in lines["counters\tsteal_ms"].dropna()]
    cpus = [len(json.loads(begin[side])) for side in ("loadgen", "server")]
    steal = (np.diff(totals, axis=0) / cpus).max(axis=1) / (np.diff(edges) / 1e6)
    samples = [json.loads(text) for text in chunks["memory_ns"]]
    percent = rule["chunk_percentile"]
    value = np.array([np.percentile(s, percent) if len(s) > 2 else np.nan for s in samples])
    level = np.nanpercentile(value, rule["level_percentile"])
    bounds = (rule["max_factor"], rule["max_chunk_steal"])
    factor, most = (math.inf if bound is None else bound for bound in bounds)
    quiet = (value <= factor * level) & (steal <= most)  # never where there is no value
    # A moment on an edge is of the later chunk, on the last edge of the last one.
    starts, ends, later = starts[:, None], ends[:, None], np.append(edges[1:-1], edges[-1] + 1)
    met = (starts < later) & (ends >= edges[:-1]) & ~quiet
    return ((starts >= edges[0]) & (ends <= edges[-1])).ravel() & ~met.any(axis=1)


class Cell:
    """A valid cell: its successes in order of arrival, its arrivals by status, its queue."""

    def __init__(self, record: Row, requests: Any, metrics: Any, machine: Any) -> None:
        start, stop = (record["window"][name] for name in ("t_warmup_end_ns", "t_stop_ns"))
        self.rate, self.window_s = record["schedule"]["rate_rps"], (stop - start) / 1e9
        measured = requests[requests["t_intended_ns"].between(start, stop, inclusive="left")]
        self.arrivals = Counter(measured["status"])
        ok = measured[measured["status"] == "ok"]
        due, first, last = (ok[f"t_{s}_ns"] for s in ("intended", "first_token", "last_token"))
        gaps, self.all = ok["completion_tokens"] - 1, pd.DataFrame({"since_s": (due - start) / 1e9})
        self.all["ttft"], self.all["e2e"] = (first - due) / 1e6, (last - due) / 1e6
        self.all["tpot"] = (last - first) / gaps / 1e6 if (gaps > 0).all() else np.nan
        self.quiet, self.watched = self.all, "quiet" in record
        if self.watched:
            spans = due.to_numpy(np.int64), last.to_numpy(np.int64)
            self.quiet = self.all[undisturbed(machine, record["quiet"]["rule"], *spans)]
        inside = metrics["ok"] & metrics["t_ns"].between(start, stop, inclusive="left")
        self.waiting = float(metrics.filter(like="values")[inside].fillna(0).sum(axis=1).median())
        tenth, e2e_s = max(1, len(ok) // 10), self.all["e2e"] / 1e3
        growth = max(0.0, e2e_s[-tenth:].median() - e2e_s[:tenth].median()) if len(ok) else 0.0
        self.effective_rps = len(ok) / (self.window_s + growth)
        self.ratio = self.effective_rps / (len(measured) / self.window_s) if len(measured) else None

    def row(self, confidence: float, p99_from: int) -> Row:
        """Columns of aggregate.csv; percentiles with their intervals from order statistics."""
        row: Row = {
            "n": len(self.quiet), "n_disturbed": len(self.all) - len(self.quiet),
            "window_s": self.window_s, "rate_rps": self.rate, "waiting_p50": self.waiting,
            "dropped": self.arrivals["dropped"], "effective_throughput_rps": self.effective_rps,
            "throughput_ratio": self.ratio,
        }  # fmt: skip
        for latency, percent in itertools.product(("ttft", "tpot", "e2e"), (50, 90, 99)):
            x = np.sort(self.quiet[latency].dropna())
            value = lo = hi = None
            if len(x) and (percent < 99 or len(x) >= p99_from):
                value, tail = np.percentile(x, percent), (1 - confidence) / 2
                low, high = stats.binom.ppf([tail, 1 - tail], len(x), percent / 100).astype(int)
                lo = min(value, x[low - 1]) if low >= 1 else None
                hi = max(value, x[high]) if high < len(x) else None
            name = f"{latency}_p{percent}"
            row |= {f"{name}_ms": value, f"{name}_lo_ms": lo, f"{name}_hi_ms": hi}
        return row


# ---- The study, and saturation (docs/study.md, "Saturation and the reference rates")


def read_json(path: Path) -> Any:
    """The content of a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def configuration_of(launch: str) -> str:
    """What a launch is started with: plain for plain_2."""
    return re.sub(r"_([2-9]|1\d|20)$", "", launch)


class Study:
    """An unpacked archive."""

    def __init__(self, root: Path) -> None:
        self.root, self.document = root, read_json(root / "study.json")
        self.config: Row = self.document["config"]
        self.statistics: Row = self.config["statistics"]
        self.confidence: float = self.statistics["confidence"]
        self.baseline: str = self.config.get("baseline", "plain")
        self.ids: list[str] = [entry["id"] for entry in self.document["configurations"]]
        self.planned: dict[str, list[Row]] = self.document["cells"]
        self.grid: dict[float, str] = {c["rate_rps"]: c["cell"] for c in self.planned["A"]}
        order: dict[str, list[Row]] = self.document["run_order"]
        self.names = {p: list(dict.fromkeys(e["config"] for e in order[p])) for p in order}
        self.plains = {
            p: sorted((n for n in names if configuration_of(n) == self.baseline), key=len)
            for p, names in self.names.items()
        }
        self.cells: dict[Key, Cell] = {}
        wanted = {
            "requests": r"status|t_\w+_ns|completion_tokens",
            "metrics": r"t_ns|ok|values\tvllm:num_requests_waiting(\{.*\})?",
            "machine": r"kind|t_ns|memory_ns|loadgen|server|counters\tsteal_ms",
        }
        tables = {kind: read_table(root, kind, names) for kind, names in wanted.items()}
        for phase in order:
            for launch, cell in itertools.product(order[phase], self.planned[phase]):
                key = (launch["config"], launch["block"], phase, cell["cell"])
                tail = f"{phase}_{key[3]}"
                folder = f"runs/{key[0]}/block{key[1]}/{phase}/{key[3]}"
                path = root / folder / f"cell_{tail}.json"
                if path.exists() and (record := read_json(path))["valid"]:
                    lines = [t.get(f"{folder}/{kind}_{tail}.jsonl") for kind, t in tables.items()]
                    self.cells[key] = Cell(record, *lines)

    @property
    def watched(self) -> bool:
        """Whether the machine was watched in any cell."""
        return any(cell.watched for cell in self.cells.values())

    def fired(self, key: Key) -> list[str]:
        """The saturation criteria that fire in a valid cell."""
        bounds, cell, p90 = self.config["saturation"], self.cells[key], lambda c: c.quantile(0.9)
        half = (
            self.cells.get((*key[:3], self.grid.get(cell.rate / 2, ""))) if key[2] == "A" else None
        )
        growth = p90(cell.all["ttft"]) / p90(half.all["ttft"]) if half and len(half.all) else 0.0
        hits = {
            "throughput_ratio": cell.ratio < bounds["throughput_ratio_min"],
            "waiting": cell.waiting > bounds["waiting_p50_max"],
            "ttft_ratio": growth > bounds["ttft_p90_ratio_max"],
        }
        return [name for name, hit in hits.items() if hit]

    def reference_rates(self) -> Row:
        """Reference and saturation rates, and who has no say in them."""
        state: dict[str, list[bool | None]] = {config: [] for config in self.ids}
        for config, at in itertools.product(self.ids, self.grid.values()):
            hits = [
                bool(self.fired(key)) for key, cell in self.cells.items() if len(cell.all)
                and key[2:] == ("A", at) and configuration_of(key[0]) == config
            ]  # fmt: skip
            state[config].append(2 * sum(hits) >= len(hits) if hits else None)
        first = {c: next((s for s in known if s is not None), True) for c, known in state.items()}
        included = [config for config in self.ids if not first[config]]
        rates: Row = {"left_out": {config: {} for config in self.ids if first[config]}}
        for name, configs in (("ref_safe", included), ("ref_load", [self.baseline])):
            rates[name] = None
            for at, rate in enumerate(self.grid if self.baseline in included else []):
                if any(state[config][at] for config in configs):
                    break
                if all(state[config][at] is False for config in configs):
                    rates[name] = rate
        rates["fallback_used"] = None in (rates["ref_safe"], rates["ref_load"])
        fallback = self.config["reference"]["fallback_rps"]
        rates |= {n: fallback for n in ("ref_safe", "ref_load") if rates[n] is None}
        saturated = {
            c: [r for r, hit in zip(self.grid, state[c], strict=True) if hit] for c in state
        }
        rates["saturation_rate_rps"] = {c: min(over, default=None) for c, over in saturated.items()}
        return rates


# ---- "The error model"


class Sample(NamedTuple):
    """A percentile of one launch's cell: its log, its bootstrap values' deviations, requests."""

    y: float
    deviations: Any
    n: int


def samples(study: Study, whole: bool) -> dict[tuple[str, str, str], dict[Launch, Sample]]:
    """The samples of each phase, cell and metric (chunks, bootstrap)."""
    of = {key: cell.all if whole else cell.quiet for key, cell in study.cells.items()}
    found: dict[tuple[str, str, str], dict[Launch, Sample]] = {}
    for (name, block, *where), ok in of.items():
        if not len(ok):
            continue
        life = max(r["e2e"].median() / 1e3 for k, r in of.items() if [*k[2:]] == where and len(r))
        window_s = study.cells[name, block, where[0], where[1]].window_s
        length = max(study.statistics["chunk_s"], life, window_s / 60)
        chunks, chunk = np.unique(np.floor(ok["since_s"] / length), return_inverse=True)
        stream = f"{study.document['seed']}/bootstrap/block{block}/{where[0]}/{where[1]}"
        words = np.frombuffer(hashlib.sha256(stream.encode()).digest(), np.uint32)
        share, size = np.full(len(chunks), 1 / len(chunks)), study.statistics["resamples"]
        drawn = np.random.default_rng(words).multinomial(len(chunks), share, size=size)
        for metric in METRICS:
            values, percent = ok[metric[:-4]].to_numpy(), int(metric[-2:])
            if np.isnan(values).any():
                continue
            point, again = (
                np.percentile(values, percent),
                resampled(values, drawn[:, chunk], percent),
            )
            if min(point, again.min()) > 0:
                sample = Sample(math.log(point), np.log(again / point), len(values))
                found.setdefault((where[0], where[1], metric), {})[name, block] = sample
    return found


def resampled(values: Any, times: Any, percent: float) -> Any:
    """Percentile of the sample in which each value stands so many times, for each row of times."""
    order = np.argsort(values, kind="stable")
    upto = np.cumsum(times[:, order], axis=1)
    position = (upto[:, -1] - 1) * (percent / 100)
    ranks = np.floor(position), np.minimum(np.floor(position) + 1, upto[:, -1] - 1)
    low, high = (values[order][(upto <= rank[:, None]).sum(axis=1)] for rank in ranks)
    return low + (high - low) * (position % 1)


class Spread(NamedTuple):
    """A configuration's own variance, and the F test of it against that of the others."""

    variance: float
    df: int
    f: float
    p: float


class Layout:
    """y = block + configuration + error by least squares over launches; s2, df and the tests."""

    def __init__(self, y: Mapping[Launch, float]) -> None:
        self.y, self.spread = y, dict[str, Spread]()
        rss, df = self.residual(y)
        for c in {configuration_of(name) for name, _ in y}:
            rest_rss, rest_df = self.residual(la for la in y if configuration_of(la[0]) != c)
            if df > rest_df > 0:
                variance, rest = max(0.0, rss - rest_rss) / (df - rest_df), rest_rss / rest_df
                f = variance / rest if rest else math.inf if variance else 0.0
                p = float(stats.f.sf(f, df - rest_df, rest_df))
                self.spread[c] = Spread(variance, df - rest_df, f, p)
        far = {c for c, test in self.spread.items() if test.p < 0.01}
        behind = [launch for launch in y if configuration_of(launch[0]) not in far]
        rss, self.df = self.residual(behind)
        self.variance, self.names = rss / max(1, self.df), len({name for name, _ in behind})

    def residual(self, launches: Iterable[Launch]) -> tuple[float, int]:
        """Residual sum of squares and degrees of freedom of a fit to some launches."""
        rows = [(block, configuration_of(name), self.y[name, block]) for name, block in launches]
        if not rows:
            return 0.0, 0
        block, group, y = (np.array(column) for column in zip(*rows, strict=True))
        matrix = np.hstack([x[:, None] == np.unique(x) for x in (block, group)]).astype(float)
        solution, _, rank, _ = np.linalg.lstsq(matrix, y, rcond=1e-9)
        rss = float(((y - matrix @ solution) ** 2).sum())
        rounding = len(y) * (1e-13 * max(1.0, np.abs(y).max())) ** 2
        return (0.0 if rss <= rounding else rss), len(y) - int(rank)

    def error(self, weights: Mapping[Launch, float]) -> tuple[float | None, float, Spread | None]:
        """Standard error of a contrast, its df, and the test where a spread is its own."""
        squares = dict.fromkeys((configuration_of(name) for name, _ in weights), 0.0)
        for (name, _), weight in weights.items():
            squares[configuration_of(name)] += weight**2
        larger = {c: t for c in squares if (t := self.spread.get(c)) and t.p < 0.05}
        parts = [(squares.pop(c) * test.variance, test.df) for c, test in larger.items()]
        parts.append((self.variance * sum(squares.values()), self.df))
        variance = sum(part for part, _ in parts)
        if self.df == 0 or not larger:
            return (math.sqrt(variance) if self.df else None), self.df, None
        df = variance**2 / sum(part**2 / df for part, df in parts)
        return math.sqrt(variance), df, min(larger.values(), key=lambda test: test.p)


class Term(NamedTuple):
    """A weight times the tax of a launch name in a cell."""

    weight: float
    config: str
    phase: str
    cell: str
    metric: str


@dataclass(frozen=True)
class Effect:
    """A tax or a linear combination of taxes; within_p None: nothing repeats."""

    point: float
    d: float  # what the error is of: the contrast of logs, or the combination's point
    back: Callable[[float], float]  # from d to the point
    blocks: tuple[int, ...]
    names: int  # launch names of a block behind s2
    share: float  # plain's, of the variance
    mark: str
    confidence: float
    se: float | None
    df: float
    own: Spread | None
    lo: float | None = None
    hi: float | None = None
    method: str = "one launch; launches not included"
    within_p: float | None = None  # the bootstrap's

    @property
    def t(self) -> float:
        """The contrast over its standard error."""
        return 0.0 if self.d == 0 else self.d / self.se if self.se else math.inf

    @property
    def p(self) -> float:
        """Two-sided p of t."""
        return float(2 * stats.t.sf(abs(self.t), self.df))

    @property
    def numbers(self) -> Row:
        """As hypotheses.json has it."""
        rest = {"method": self.method, "n_blocks": len(self.blocks), "mark": self.mark}
        return {"point": self.point, "lo": self.lo, "hi": self.hi, **rest}

    def by_model(self, blocks: int | None = None) -> "Effect":
        """With the block model's interval, as it would be in a study of so many blocks."""
        assert self.se is not None
        n, se, df = len(self.blocks), self.se, self.df
        if blocks is not None:
            se = se * math.sqrt(n / blocks)
            more = (self.names - 1) * (blocks - n)
            df = df * (blocks - 1) / (n - 1) if self.own else df + more
        half, method = (
            float(stats.t.ppf((1 + self.confidence) / 2, df)) * se,
            f"block model (df {df})",
        )
        if self.own:
            method = f"own spread (df {df:.1f}; spread F {self.own.f:.1f}, p {self.own.p:.3f})"
        lo, hi = self.back(self.d - half), self.back(self.d + half)
        return replace(self, se=se, df=df, lo=lo, hi=hi, method=method)


class Taxes:
    """The effects of a study; `whole`: with the requests of disturbed time."""

    def __init__(self, study: Study, whole: bool = False) -> None:
        self.study, self.samples = study, samples(study, whole)
        self._layouts: dict[Any, Layout] = {}

    def sides(self, term: Term, launches: Iterable[Launch]) -> dict[Launch, list[Launch]]:
        """The launch of a term in each block, and the valid launches of plain beside it."""
        there, plain = set(launches), [n for n in self.study.plains[term.phase] if n != term.config]
        ours = [launch for launch in launches if launch[0] == term.config]
        sides = {la: [(n, la[1]) for n in plain if (n, la[1]) in there] for la in ours}
        return {launch: base for launch, base in sides.items() if base}

    def effect(self, *terms: Term, confidence: float | None = None) -> Effect | None:
        """A tax (one term of weight 1), or a linear combination of taxes."""
        parts = [self.samples.get(term[2:], {}) for term in terms]
        shared = [launch for launch in parts[0] if all(launch in part for part in parts)]
        each = [{block for _, block in self.sides(term, shared)} for term in terms]
        blocks = tuple(sorted(set.intersection(*each)))
        if not blocks:
            return None
        used = [launch for launch in shared if launch[1] in blocks]
        contrasts, d, moved, marks = [], [], [], dict[str, None]()
        for term, part in zip(terms, parts, strict=True):
            sides = self.sides(term, used)
            w = dict.fromkeys(sides, 1 / len(blocks))
            w |= {la: -1 / len(blocks) / len(base) for base in sides.values() for la in base}
            contrasts.append(w)
            d.append(sum(weight * part[la].y for la, weight in w.items()))
            moved.append(sum(weight * part[la].deviations for la, weight in w.items()))
            marks |= dict.fromkeys(self.marks(term, w))
        weight, is_log = [term.weight for term in terms], len(terms) == 1
        point = float(np.dot(weight, np.expm1(d)))
        scale = [1.0] if is_log else [a * math.exp(b) for a, b in zip(weight, d, strict=True)]
        changed = np.array(d)[:, None] + np.array(moved)
        replicates = changed[0] if is_log else np.dot(weight, np.expm1(changed))
        total, key, y = contrasts[0], (terms[0][2:], ()), {la: parts[0][la].y for la in shared}
        if len({term.cell for term in terms}) > 1:  # of one configuration: z = sum of v y
            key = (terms, tuple(scale))
            y = {la: sum(v * p[la].y for v, p in zip(scale, parts, strict=True)) for la in shared}
        else:
            pairs = list(zip(scale, contrasts, strict=True))
            total = {la: x for la in used if (x := sum(v * w.get(la, 0.0) for v, w in pairs))}
        if key not in self._layouts:
            self._layouts[key] = Layout(y)
        layout, squares = self._layouts[key], {la: w**2 for la, w in total.items()}
        share = 1 - sum(s for la, s in squares.items() if la[0] == terms[0].config) / sum(
            squares.values()
        )
        level = confidence or self.study.confidence
        effect = Effect(
            point, d[0] if is_log else point, math.expm1 if is_log else float, blocks, layout.names,
            share, "; ".join(marks), level, *layout.error(total),
        )  # fmt: skip
        if len(blocks) < 2 or effect.se is None:
            return effect
        lo, hi = (float(q) for q in np.quantile(replicates, [(1 - level) / 2, (1 + level) / 2]))
        smaller = min(int((replicates <= 0).sum()), int((replicates >= 0).sum()))
        within = min(1.0, 2 * (smaller + 1) / (len(replicates) + 1))
        half = float(stats.t.ppf((1 + level) / 2, effect.df)) * effect.se
        if 2 * half >= hi - lo:
            return replace(effect.by_model(), within_p=within)
        method, back = "within-launch bootstrap", effect.back
        return replace(effect, lo=back(lo), hi=back(hi), method=method, within_p=within)

    def marks(self, term: Term, launches: Iterable[Launch]) -> Iterable[str]:
        """Which of a tax's configurations were saturated or dropped arrivals ("Verdicts")."""
        cells: dict[str, list[Key]] = {}
        for name, block in launches:
            cells.setdefault(configuration_of(name), []).append((name, block, *term[2:4]))
        for name, keys in cells.items():
            if any(self.study.fired(key) for key in keys):
                yield f"{name} saturated"
            if dropped := sum(self.study.cells[key].arrivals["dropped"] for key in keys):
                yield f"{name} dropped {dropped} arrivals"


# ---- "Verdicts"


def sidak(p: float, k: int) -> float:
    """p adjusted for k comparisons."""
    return -math.expm1(k * math.log1p(-min(p, 1 - 1e-16)))


def adjusted(effect: Effect, family: Sequence[Effect]) -> float:
    """p of t, adjusted for the family that is compared with one baseline (Dunnett, Sidak)."""
    if effect.own:
        return sidak(effect.p, len(family))
    # Trapezoids over plain's error (standard normal) and the log of s over sigma (chi).
    z, log_s, df = (
        np.linspace(-9, 9, 241),
        np.linspace(math.log(1e-4), math.log(30), 801),
        effect.df,
    )
    s, of_z = np.exp(log_s), stats.norm.pdf(z) * (z[1] - z[0])
    of_s = stats.chi.pdf(s * math.sqrt(df), df) * math.sqrt(df) * s * (log_s[1] - log_s[0])
    s, of_s = s[of_s > 1e-18, None], of_s[of_s > 1e-18]
    inside, pooled = np.ones((len(s), len(z))), [member for member in family if not member.own]
    for share, times in Counter(round(member.share, 12) for member in pooled).items():
        shift, reach, own = math.sqrt(share) * z, abs(effect.t) * s, math.sqrt(1 - share)
        inside *= (ndtr((shift + reach) / own) - ndtr((shift - reach) / own)) ** times
    none = float(of_s @ inside @ of_z) * (1 - effect.p) ** (len(family) - len(pooled))
    return min(1.0, max(effect.p, 1 - none))


def verdict(effect: Effect, p: float | None, margin: float) -> str:
    """The verdict of a tax whose adjusted p is given."""
    if effect.mark:
        return "no verdict (marked)"
    if p is None or effect.lo is None or effect.hi is None or len(effect.blocks) < 3:
        return "point estimate, no verdict"
    if -margin < effect.lo and effect.hi < margin:
        return "NO TAX"
    return "TAX" if p < 1 - effect.confidence and effect.lo > 0 else "INCONCLUSIVE"


def blocks_needed(effect: Effect, family: Sequence[Effect], margin: float) -> int | None:
    """The smallest number of blocks, up to 100, that would decide an inconclusive tax."""
    for blocks in range(len(effect.blocks) + 1, 101):
        later = effect.by_model(blocks)
        p = adjusted(later, family) if later.lo and later.lo > 0 else 1.0
        if verdict(later, p, margin) != "INCONCLUSIVE":
            return blocks
    return None


def tax_rows(study: Study, taxes: Taxes, rates: Row) -> Rows:
    """taxes.csv by configuration, phase, cell and metric."""
    rows, whole = Rows(), Taxes(study, whole=True)
    confirmatory = [rates[name] for name in study.statistics["confirmatory"]]
    cells = [(phase, cell) for phase, planned in study.planned.items() for cell in planned]
    for (phase, cell), metric in itertools.product(cells, METRICS):
        where, plains = (phase, cell["cell"], metric), study.plains[phase]
        rate, margin = cell["rate_rps"], study.statistics["margins"][metric]
        at_rate = [name for name in ("ref_safe", "ref_load") if rates[name] == rate]
        reference = {"A": [*at_rate, ""][0], "B": "ref_safe", "Bp": "ref_load"}[phase]
        named = phase == "A" and rate in confirmatory
        compared = [n for n in study.names[phase] if n not in (plains[:-1] or plains)]
        effects = {name: taxes.effect(Term(1, name, *where)) for name in compared}
        noise = effects.get(plains[-1])  # the A/A comparison
        tested = [e for e in effects.values() if e and e.within_p and not e.mark and e != noise]
        for config, effect in effects.items():
            term = Term(1, config, *where)
            row = rows[config, *where] = {
                "reference": reference, "margin": margin, "tax": None, "verdict": None,
                "family": "confirmatory" if named else "exploratory", "n_blocks": 0,
                "aa_tax": noise and noise.point, "aa_lo": noise and noise.lo,
                "aa_hi": noise and noise.hi,
            }  # fmt: skip
            if effect is None:
                continue
            family = [effect] if effect == noise else tested
            p = None
            if effect.within_p and not effect.mark:
                p = max(adjusted(effect, family), sidak(effect.within_p, len(family)))
            found, sides = taxes.samples[where], taxes.sides(term, taxes.samples[where])
            bases = [[found[launch] for launch in base] for base in sides.values()]
            plain_ms = math.exp(np.mean([np.mean([s.y for s in base]) for base in bases]))
            config_ms = math.exp(np.mean([found[launch].y for launch in sides]))
            lo, hi, all_in = effect.lo, effect.hi, whole.effect(term)
            row |= {
                "tax": effect.point, "tax_lo": lo, "tax_hi": hi, "n_blocks": len(effect.blocks),
                "plain_ms": plain_ms, "config_ms": config_ms, "abs_ms": config_ms - plain_ms,
                "abs_lo_ms": None if lo is None else plain_ms * lo,
                "abs_hi_ms": None if hi is None else plain_ms * hi,
                "n_config": sum(found[launch].n for launch in sides),
                "n_plain": sum(s.n for base in bases for s in base),
                "interval_method": effect.method, "mark": effect.mark,
                "error_df": effect.df if effect.within_p else None,
                "p_value": max(effect.p, effect.within_p) if effect.within_p else None,
                "p_adjusted": p, "verdict": verdict(effect, p, margin), "blocks_needed": None,
            }  # fmt: skip
            if all_in and study.watched:
                row |= {"tax_all": all_in.point, "tax_all_lo": all_in.lo, "tax_all_hi": all_in.hi}
            if row["verdict"] == "INCONCLUSIVE":
                row["blocks_needed"] = blocks_needed(effect, family, margin)
    return rows


# ---- Hypotheses (docs/study.md, "Hypotheses")


def hypotheses(study: Study, taxes: Taxes, rates: Row) -> dict[str, Row]:
    """Verdict and effects of H1 to H6, as in hypotheses.json."""
    limits, safe = study.config["hypotheses"], study.grid.get(rates["ref_safe"], "")
    least, (low, high) = limits["h1_min_tax"], (pp / 100 for pp in limits["h2_gap_band_pp"])
    share, off = limits["h3_framework_share"], limits["h4_tolerance"]

    def at(**weights: float) -> Effect | None:
        terms = [Term(w, config, "A", safe, "ttft_p90") for config, w in weights.items()]
        return None if study.baseline in weights else taxes.effect(*terms)

    def stack(multi: float, parts: float) -> Effect | None:
        return at(multi_mooncake_lmcache=multi, mooncake_both=parts, lmcache_only=parts)

    tax, multi = at(mooncake_both=1), at(multi_mooncake_lmcache=1)
    gap, split = at(mooncake_both=1, nixl_both=-1), at(noop_connector=1, mooncake_both=-share)
    others = {"noop_tax": at(noop_connector=1), "mooncake_tax": tax}
    parts = {"multi_tax": multi, "mooncake_tax": tax, "lmcache_tax": at(lmcache_only=1)}
    # Each: the effects that it is read off, when it is supported, when refuted, what is published.
    asked: dict[str, tuple[list[Effect | None], Rule, Rule, Row]] = {
        "H1": ([tax], lambda e: e.lo >= least, lambda e: e.hi < least, {"tax_ttft_p90": tax}),
        "H2": (
            [gap], lambda e: low <= e.lo and e.hi <= high, lambda e: e.hi < low or e.lo > high,
            {"gap": gap},
        ),
        "H3": (
            [split, tax], lambda s, t: t.lo > 0 and s.hi < 0, lambda s, t: t.lo > 0 and s.lo >= 0,
            others | {"noop_minus_share_of_mooncake": split},
        ),
        "H4": (
            [multi, stack(off - 1, 1), stack(1 + off, -1)],
            lambda m, over, under: m.lo > 0 and over.lo >= 0 and under.lo >= 0,
            lambda m, over, under: m.lo > 0 and (over.hi < 0 or under.hi < 0),
            parts | {"multi_minus_sum": stack(1, -1)},
        ),
        "H5": growth(study, taxes, "ttft_p90", ("input_tokens", "output_tokens")),
        "H6": growth(study, taxes, "tpot_p90", ("output_tokens", "input_tokens")),
    }  # fmt: skip
    return {name: decide(study, *question) for name, question in asked.items()}


def growth(study: Study, taxes: Taxes, metric: str, axes: tuple[str, str]) -> Any:
    """Whether a tax grows along the first axis of Phase B, averaged over the other."""
    cells = {(c[axes[0]], c[axes[1]]): c["cell"] for c in study.planned["B"]}
    lengths, others = (sorted({shape[axis] for shape in cells}) for axis in (0, 1))
    config, margin = "mooncake_both", study.statistics["margins"][metric]

    def change(a: int, b: int, level: float) -> Effect | None:
        signs = itertools.product(((1, b), (-1, a)), others)
        terms = [Term(w / len(others), config, "B", cells[x, o], metric) for (w, x), o in signs]
        return None if study.baseline == config else taxes.effect(*terms, confidence=level)

    pairs, level = list(itertools.pairwise(lengths)), study.confidence
    steps = [change(*pair, level) for pair in pairs]
    strict = [change(*pair, 1 - (1 - level) / len(pairs)) for pair in pairs]
    whole, k = change(lengths[0], lengths[-1], level) if pairs else None, len(pairs)
    return (
        [whole, *steps, *strict],
        lambda _, *rest: all(step.lo > 0 for step in rest[:k]),
        lambda whole, *rest: any(step.hi < 0 for step in rest[k:]) or whole.hi < margin,
        {"whole": whole, "steps": steps},
    )


def decide(study: Study, effects: Any, yes: Rule, no: Rule, published: Row) -> Row:
    """The verdict of a hypothesis, and its numbers; without one of its effects it has none."""
    if None in effects or None in published.values():
        return {"verdict": CANNOT_TELL, "numbers": {}}

    def told(effects: Sequence[Effect]) -> str:
        return SUPPORTED if yes(*effects) else REFUTED if no(*effects) else CANNOT_TELL

    numbers = {
        name: [e.numbers for e in effect] if isinstance(effect, list) else effect.numbers
        for name, effect in published.items()
    }
    if any(e.mark or len(e.blocks) < 3 or e.lo is None for e in effects):
        return {"verdict": CANNOT_TELL, "numbers": numbers}
    verdict, more = told(effects), range(study.document["blocks"] + 1, 101)
    if verdict == CANNOT_TELL:
        ahead = (n for n in more if told([e.by_model(n) for e in effects]) != CANNOT_TELL)
        numbers["blocks_needed"] = next(ahead, None)
    return {"verdict": verdict, "numbers": numbers}


# ---- Beside the published numbers


class Comparison:
    """How many values were compared, and the places at which they differ."""

    def __init__(self) -> None:
        self.count, self.differing = 0, list[str]()

    def equal(self, where: str, published: Any, again: Any) -> bool:
        """Compare a value, or the parts of a record or list; published texts are those of a CSV."""
        if isinstance(again, dict):
            parts = [(f"{where} {k}", (published or {}).get(k), v) for k, v in again.items()]
            return all([self.equal(*part) for part in parts])
        if isinstance(again, list):
            pairs = enumerate(itertools.zip_longest(published or [], again))
            return all([self.equal(f"{where} {n}", *pair) for n, pair in pairs])
        self.count += 1
        if again is None or isinstance(again, str | bool):
            same = str("" if published is None else published) == str(
                "" if again is None else again
            )
        else:
            absolute = P_ADJUSTED_WITHIN if where.endswith("p_adjusted") else 1e-12
            same = published not in ("", None) and math.isclose(
                float(published), again, rel_tol=WITHIN, abs_tol=absolute
            )
        if not same:
            self.differing.append(f"{where}: published {published}, recomputed {again}")
        return same

    def table(
        self, path: Path, keys: Sequence[str], rows: Rows, lines: list[Row]
    ) -> dict[Any, bool]:
        """Compare rows with those of a CSV; which are equal."""
        listed = {tuple(line[key] for key in keys): line for line in lines}
        same = {}
        for key in {**listed, **rows}:
            where = f"{path.name} {' '.join(key)}"
            same[key] = self.equal(where, listed.get(key), rows.get(key, {"row": "missing"}))
        return same


def spelled(row: Row, names: Sequence[str]) -> str:
    """`+12.34% [+10.12, +14.56]`."""
    tax, lo, hi = (row.get(name) for name in names)
    if tax in (None, ""):
        return "no number"
    bounds = "" if lo in (None, "") else f" [{100 * float(lo):+.2f}, {100 * float(hi):+.2f}]"
    return f"{100 * float(tax):+.2f}%{bounds}"


def verify(study: Study) -> int:
    """Compare all; print taxes at the reference rates and hypotheses. The count of differences."""
    folder, compared = study.root / "published/analysis", Comparison()
    published = read_json(study.root / "reference_rates.json")
    rates = study.reference_rates()
    compared.equal("reference_rates.json", published, rates)
    least = study.statistics["p99_min_samples"]
    keys = ("config", "block", "phase", "cell")
    rows: Rows = {}
    for key, cell in study.cells.items():
        rows[key[0], str(key[1]), *key[2:]] = cell.row(study.confidence, least) | {
            "saturated": str(bool(study.fired(key))).lower(),
            "saturation_criteria": ";".join(study.fired(key)),
        }
    lines = [row for row in read_csv(folder / "aggregate.csv") if row["block"] != "all"]
    compared.table(
        folder / "aggregate.csv", keys, rows, [r for r in lines if r["status"] == "valid"]
    )
    taxes = Taxes(study)
    keys = ("config", "phase", "cell", "metric")
    again, lines = tax_rows(study, taxes, rates), read_csv(folder / "taxes.csv")
    same = compared.table(folder / "taxes.csv", keys, again, lines)
    names = ("tax", "tax_lo", "tax_hi")
    for reference, metric in itertools.product(("ref_safe", "ref_load"), METRICS):
        shown = [
            row
            for row in lines
            if (row["reference"], row["phase"], row["metric"]) == (reference, "A", metric)
        ]
        if shown:
            print(f"\n{metric} at {reference}, {rates[reference]:g} requests/s")
        for row in shown:
            key = tuple(row[name] for name in keys)
            print(
                f"{row['config']:23}{spelled(row, names):27}{row['verdict'][:13]:14}{spelled(again.get(key, {}), names):27}{'ok' if same[key] else 'DIFFERS'}"
            )
    print("\nhypotheses")
    told = {entry["id"]: entry for entry in read_json(folder / "hypotheses.json")["hypotheses"]}
    for name, found in hypotheses(study, taxes, rates).items():
        ok = compared.equal(f"hypotheses.json {name}", told.get(name), found)
        print(
            f"{name:23}{told.get(name, {}).get('verdict'):41}{found['verdict']:27}{'ok' if ok else 'DIFFERS'}"
        )
    print()
    for line in compared.differing:
        print(f"DIFFERS {line}")
    print(f"{compared.count:,} values, {len(compared.differing)} differ.\n{NOT_CHECKED}")
    return len(compared.differing)


def read_csv(path: Path) -> list[Row]:
    """The rows of a CSV, as text."""
    with path.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path(__file__).resolve().parent)
    root = parser.parse_args().folder
    if not (root / "study.json").is_file() or not (root / "tables").is_dir():
        print(f"{root}: no unpacked archive: study.json or tables/ is missing")
        return 2
    return 1 if verify(Study(root)) else 0


if __name__ == "__main__":
    sys.exit(main())
