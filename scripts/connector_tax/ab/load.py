"""The load of a comparison: random requests of a rate and shape, a slice of a trace, or prompts."""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from connector_tax.ab.arguments import MOST_IN_FLIGHT, judged_of
from connector_tax.artifacts.metrics import ALL_METRICS
from connector_tax.artifacts.study_records import TrafficSection
from connector_tax.files import sha256_file
from connector_tax.loadgen.prompts import read_prompts
from connector_tax.loadgen.sessions import Prompt
from connector_tax.loadgen.trace import BLOCK, Trace, read_trace, trace_note

# Successes per cell that are enough for a precise median.
SUCCESSES = 100
SHORTEST_S, LONGEST_S = 8.0, 60.0
SHORTEST_DRAIN_S = 20.0
# The fewest requests of a file that a cell measures.
FEWEST = 20
# Shortest window of a closed loop, in durations of a request.
LIVES = 4


class LoadError(Exception):
    """A file's requests cannot be measured; the text says why."""


@dataclass(frozen=True)
class Load:
    """The load of each launch.

    Attributes:
        rates: requests/s; for a file the mean.
        shape: input and output tokens; for a file the means.
        longest: most tokens of a request; None if unknown.
        cell: the configuration's section `cell`.
        traffic: for a file the section `traffic`, else None.
        lines: for a file the lines to send.
        notes: lines to print with the answer.
    """

    rates: list[float]
    shape: tuple[int, int]
    longest: int | None
    cell: dict[str, Any]
    traffic: TrafficSection | None = None
    lines: bytes = b""
    notes: tuple[str, ...] = ()
    concurrency: int | None = None

    @property
    def phase_a(self) -> dict[str, Any]:
        """Return the section of a study's configuration that describes the rate sweep."""
        section: dict[str, Any] = {"rates_rps": self.rates, "input_tokens": self.shape[0],
                   "output_tokens": self.shape[1]}  # fmt: skip
        if self.concurrency is not None:
            section["concurrency"] = self.concurrency
        return section if self.traffic is None else {**section, "traffic": self.traffic}


def load_of(
    options: argparse.Namespace, life_s: float, most_s: float, rate_rps: float | None = None
) -> Load:
    """Return the load for the options.

    Args:
        life_s: duration of a request among others, s.
        most_s: time of a launch for the load, to which a trace is cut, s.

    Raises:
        LoadError: the file or the time is too short.
        ValueError, OSError: the file is wrong; names file, line and key.
    """
    warmup_s = max(1.0, 1.5 * life_s)
    if options.trace is not None:
        return _of_trace(options, warmup_s, life_s, most_s)
    rates = options.rate
    if options.concurrency is not None:
        rates = [float(f"{rate_rps or options.concurrency / life_s:.4g}")]
    lowest = float(min(rates))
    # The number that the verdicts' medians need.
    needed = _needed(options)
    window_s = max(min(max(SUCCESSES / lowest, SHORTEST_S), LONGEST_S), needed / lowest)
    if options.concurrency is not None:
        window_s = max(window_s, LIVES * life_s)
    if options.prompts is not None:
        return _of_prompts(options, warmup_s, life_s, window_s)
    least = max(needed, math.floor(0.6 * window_s * lowest))
    cell = _cell(warmup_s, (window_s, 2 * window_s), least, max(rates), life_s)
    if options.concurrency is not None:
        cell["inflight_cap"] = options.concurrency
    return Load(rates, options.shape, sum(options.shape), cell, concurrency=options.concurrency)


def _needed(options: argparse.Namespace) -> int:
    """Return the number of requests per cell that the judged percentiles need."""
    return max(ALL_METRICS[name].least for name in judged_of(options))


def _cell(
    warmup_s: float, window_s: tuple[float, float], least: int, rate_rps: float, life_s: float
) -> dict[str, Any]:
    in_flight = min(MOST_IN_FLIGHT, max(64, math.ceil(rate_rps * life_s * 8)))
    return {
        "warmup_s": warmup_s,
        "floor_s": window_s[0],
        "cap_s": window_s[1],
        "min_completed": max(1, least),
        "drain_s": _drain_s(life_s),
        "inflight_cap": in_flight,
        "request_timeout_s": max(60.0, 20 * life_s),
    }


def _drain_s(life_s: float) -> float:
    return max(SHORTEST_DRAIN_S, 10 * life_s)


def _of_trace(options: argparse.Namespace, warmup_s: float, life_s: float, most_s: float) -> Load:
    """Return a trace's load, cut to `most_s` plus the time to answer the measured requests."""
    whole = read_trace(options.trace, block=options.trace_block)
    starts_s = whole.offsets_ns(options.trace_speed) / 1e9
    length_s = min(float(starts_s[-1]), most_s)
    window_s = length_s - warmup_s
    measured = whole.lines[slice(*np.searchsorted(starts_s, (warmup_s, length_s)))]
    fewest = max(FEWEST, _needed(options))
    if len(measured) < fewest:
        raise LoadError(
            f"--trace: found {len(measured)} requests in {max(window_s, 0):.0f} s after a warm-up"
            f" of {warmup_s:.0f} s; allowed: at least {fewest} (--trace-speed, --minutes, or a"
            " longer trace)"
        )
    sent = Trace(whole.lines[: np.searchsorted(starts_s, length_s + _drain_s(life_s))], whole.block)
    kept = Trace(whole.lines[: np.searchsorted(starts_s, length_s)], whole.block)
    rate = float(f"{len(measured) / window_s:.4g}")
    lengths = [(line.input_length, line.output_length) for line in measured]
    mean_in, mean_out = (round(mean) for mean in np.mean(lengths, axis=0))
    total = sum(line.input_length for line in sent.lines)
    longest = [max(getattr(line, f"{side}_length") for line in sent.lines)
               for side in ("input", "output")]  # fmt: skip
    traffic = _section(options, options.trace, len(sent), longest)
    traffic |= {
        "kind": "trace",
        "speed": options.trace_speed,
        "block": options.trace_block,
        "repeated_share": kept.repeated_share,
        "most_hits": round(sent.repeated_share * total),
    }
    cell = _cell(warmup_s, (window_s, window_s), math.floor(0.6 * len(measured)), rate, life_s)
    return Load(
        [rate], (max(1, mean_in), max(2, mean_out)),
        max(line.input_length + line.output_length for line in sent.lines),
        cell, traffic, msgspec.json.Encoder().encode_lines(sent.lines),
        (trace_note(kept, options.trace_speed),),
    )  # fmt: skip


def _of_prompts(
    options: argparse.Namespace, warmup_s: float, life_s: float, window_s: float
) -> Load:
    """Return a load that sends each prompt once per launch; the window ends with the last one."""
    prompts = read_prompts(options.prompts, options.chat, options.max_tokens)
    (rate,) = options.rate
    most_s = len(prompts) / rate - warmup_s
    fewest = max(FEWEST, _needed(options))
    if most_s * rate < fewest:
        raise LoadError(
            f"--prompts: found {len(prompts)} prompts; allowed: at least"
            f" {math.ceil(warmup_s * rate) + fewest}, of which {rate:g}/s are sent, after a warm-up"
            f" of {warmup_s:.0f} s"
        )
    window_s, cap_s = min(window_s, most_s), min(2 * window_s, most_s)
    count = min(len(prompts), math.ceil((warmup_s + cap_s + _drain_s(life_s)) * rate))
    lines = options.prompts.read_bytes().splitlines(keepends=True)[:count]
    sizes = [_size(prompt) for prompt in prompts.prompts[:count]]
    lengths = prompts.lengths[:count]
    longest = [max(bytes_ for _, bytes_ in sizes), max(lengths)]
    traffic = _section(options, options.prompts, count, longest)
    shape = round(np.mean([words for words, _ in sizes])), round(np.mean(lengths))
    least = math.floor(0.6 * window_s * rate)
    cell = _cell(warmup_s, (window_s, cap_s), least, rate, life_s)
    note = f"a launch sends {count} of {len(prompts)} prompts, each of them once, in {cap_s:.0f} s"
    return Load(
        [rate], (max(1, shape[0]), max(2, shape[1])), None, cell, traffic, b"".join(lines), (note,)
    )


def _section(
    options: argparse.Namespace, path: Path, requests: int, longest: list[int]
) -> TrafficSection:
    return {
        "kind": "prompts",
        "source": path.name,
        "sha256": sha256_file(path),
        "requests": requests,
        "speed": 1.0,
        "block": BLOCK,
        "max_tokens": options.max_tokens,
        "longest": longest,
        "repeated_share": 0.0,
    }


def _size(prompt: Prompt) -> tuple[int, int]:
    """Return an estimate of a prompt's tokens, and an upper bound."""
    if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
        return len(prompt), len(prompt)
    text = msgspec.json.encode(prompt)
    return len(text.split()), len(text)
