"""`python -m benchmarks.admission`: fifo against pack admission.

Repeats an experiment with a GPT-2 engine, here called the source, on the embedded engine.

128 requests at once, prompts of 515, 4, 4, 4 tokens in turn (its prompt repeats 512, 1, 1, 1 and
three tokens that make each prompt its own), 32 new tokens each, a prefill budget of 256 tokens in a
round, 8 sequences in a decode step. fifo and pack (with a forced FIFO round every 8) take turns,
three runs each on a fresh engine; the medians over the runs are printed beside the source's tables,
and beside a replay in virtual time that spends time as the source's engine does.

The embedded engine computes prefill and decode in one pass; the source's engine runs one forward
pass for the prefill of a round and one for its decode batch, its first pass is slow (the device
warms up), and its 128 requests come one after the other. Those four facts, and not the admission,
make what the embedded engine's table lacks: the tail of the inter-token latency (a token that is
waited for during the prefills waits for sixteen rounds of two passes) and pack's median TTFT (all
short prompts have come before the first pass ends, and go together in the second). The replay has
them, and takes every decision by the engine's own scheduler and admission.
"""

import argparse
import asyncio
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import run_alone
from benchmarks.running import EngineStartError, payload, running
from connector_tax.config import ConfigError, load_yaml
from connector_tax.engine.scheduler import Scheduler, SchedulerOptions, Sequence
from connector_tax.files import write_json, write_text

_REQUESTS = 128
_REPEATS = (512, 1, 1, 1)
_UNIQUE = 3
_NEW_TOKENS = 32
_RUNS = 3

_SCHEDULER = {
    "max_num_seqs": _REQUESTS,
    "max_decode_seqs_per_step": 8,
    "prefill_max_tokens": 256,
    "prefill_max_batch_size": 128,
    "decode_first": False,
    "enable_prefix_caching": False,
}
_POLICIES: dict[str, dict[str, Any]] = {
    "fifo": {"prefill_admission_policy": "fifo", "prefill_force_fifo_every": 0},
    "pack": {
        "prefill_admission_policy": "pack",
        "prefill_admission_lookahead": 64,
        "prefill_force_fifo_every": 8,
    },
}
# The source's GPT-2 in steps that carry prefill and decode together: a decode step of 8 (10.7 ms)
# was fitted to fifo's throughput, beta1 to the change of TTFT p99 from fifo to pack; how 10.7 ms
# are shared out, and the jitter, are choices.
_STEP_COST = {
    "delta_us": 400.0,
    "beta0_us": 8900.0,
    "beta1_us_per_prefill_token": 4.0,
    "beta2_us_per_decode_seq": 175.0,
    "beta3_us_per_kv_token": 0.0,
    "jitter_rel_sd": 0.01,
    "launch_offset_rel_sd": 0.0,
}

# The source's two tables: p50, p95, p99 in ms, throughput in completion tokens/s.
_SOURCE: dict[str, dict[str, Any]] = {
    "fifo": {
        "submit_wall_ms": 103.464,
        "add_request_ms": [0.03, 0.42, 0.46],
        "ttft_ms": [672.29, 1106.39, 1144.49],
        "tpot_ms": [142.26, 145.73, 146.08],
        "itl_ms": [152.93, 160.77, 189.82],
        "latency_ms": [5184.35, 5341.20, 5347.30],
        "throughput_tokens_s": 751.55,
    },
    "pack": {
        "submit_wall_ms": 105.095,
        "add_request_ms": [0.03, 0.42, 0.46],
        "ttft_ms": [216.77, 611.07, 689.69],
        "tpot_ms": [156.40, 158.05, 158.17],
        "itl_ms": [155.06, 190.19, 221.63],
        "latency_ms": [5086.20, 5258.17, 5263.87],
        "throughput_tokens_s": 763.48,
    },
}
_NAMES = {
    "add_request_ms": "add_request",
    "ttft_ms": "TTFT",
    "tpot_ms": "TPOT",
    "itl_ms": "ITL",
    "latency_ms": "latency",
}
_FITTED = """\
emulated: 128 requests written at once to an engine whose steps carry prefill and decode
  together. Fitted to the source: a decode step of 8 (delta + beta0 + 8 beta2 = 10.7 ms) to
  fifo's tokens/s, beta1 = 4 us for a prefill token to the change of TTFT p99. The rest follows.
replay: virtual time, the same admission; prefill and decode in passes of their own, a slow first
  pass, requests 0.81 ms apart (fifo's submit wall). Fitted to the source: first pass + 202 ms and
  prefill pass 5.9 ms to fifo's TTFT p50 and p99, decode pass 9.56 ms to fifo's ITL p50, 0.58 ms for
  each prefilled request to pack's TTFT p50. The rest follows.
add_request: emulated, the write of a request to its socket; source, its call of that name.
"""


class StudyError(Exception):
    """The study could not be run."""


class Stream(NamedTuple):
    """One request in CLOCK_MONOTONIC ns: its write, begun and done, and the read of each token."""

    t_send_ns: int
    t_sent_ns: int
    tokens_ns: list[int]


def prompts() -> list[list[int]]:
    """The prompts' token ids; no two begin alike."""
    lengths = [_REPEATS[i % len(_REPEATS)] for i in range(_REQUESTS)]
    return [[i, 1000 + i, 2000 + i, *[7] * length] for i, length in enumerate(lengths)]


def summarize(streams: list[Stream]) -> dict[str, Any]:
    """The source's figures: p50, p95 and p99 in ms, throughput in completion tokens/s."""
    send, sent, tokens = (np.array(stamps) for stamps in zip(*streams, strict=True))
    first, last = tokens[:, 0], tokens[:, -1]
    values = {
        "add_request_ms": sent - send,
        "ttft_ms": first - send,
        "tpot_ms": (last - first) / (_NEW_TOKENS - 1),
        "itl_ms": np.diff(tokens).ravel(),
        "latency_ms": last - send,
    }
    return {
        **{name: np.percentile(ns / 1e6, [50, 95, 99]).tolist() for name, ns in values.items()},
        "submit_wall_ms": float(sent.max() - send.min()) / 1e6,
        "throughput_tokens_s": tokens.size / (float(last.max() - send.min()) / 1e9),
    }


# ---- the replay

# Of the source's engine. Fitted: _FIRST_MS (of the first pass, beyond its cost) and _PREFILL_MS (of
# a prefill pass) to fifo's TTFT p50 and p99, _DECODE_MS (of a decode pass) to fifo's ITL p50,
# _PREFILL_REQUEST_MS (for each request in a prefill pass) to pack's TTFT p50; _SUBMIT_MS (from one
# request to the next) is fifo's submit wall over 127. The other figures had no part in it.
_FIRST_MS, _PREFILL_MS, _PREFILL_REQUEST_MS, _DECODE_MS = 202.12, 5.905, 0.5835, 9.558
_SUBMIT_MS = 103.464 / 127


def replayed(policy: str) -> dict[str, Any]:
    """The figures of a policy in the replay, which has no add_request latency."""
    options: dict[str, Any] = {**_SCHEDULER, **_POLICIES[policy]}
    lengths = [len(prompt) for prompt in prompts()]
    scheduler = Scheduler(
        SchedulerOptions(**options, max_num_batched_tokens=8192, kv_blocks=16384, kv_block_size=16),
        max(lengths) + _NEW_TOKENS,
    )
    requests = [Sequence(i, length, _NEW_TOKENS, []) for i, length in enumerate(lengths)]
    submitted_ms = [i * _SUBMIT_MS for i in range(len(requests))]
    tokens_ms: list[list[float]] = [[] for _ in requests]
    now, extra, submitted = 0.0, _FIRST_MS, 0
    while submitted < len(requests) or scheduler.has_work:
        if not scheduler.has_work:
            now = max(now, submitted_ms[submitted])
        while submitted < len(requests) and submitted_ms[submitted] <= now:
            scheduler.add(requests[submitted])
            submitted += 1
        plan = scheduler.plan()
        prefilling = [s for s in plan.tokens if s.generated == 0]
        if prefilling:
            now += extra + _PREFILL_MS + _PREFILL_REQUEST_MS * len(prefilling)
            extra = 0.0
        prefilled = now
        if plan.decode_seqs:
            now += _DECODE_MS
        for sequence in scheduler.commit(plan):
            first = sequence.generated == 1
            tokens_ms[sequence.arrival].append(prefilled if first else now)
    streams = [
        Stream(round(at * 1e6), round(at * 1e6), [round(token * 1e6) for token in tokens])
        for at, tokens in zip(submitted_ms, tokens_ms, strict=True)
    ]
    return {**summarize(streams), "add_request_ms": None}


# ---- the engine


async def _receive(t_send_ns: int, t_sent_ns: int, reader: asyncio.StreamReader) -> Stream:
    stamps: list[int] = []
    got = b""
    while chunk := await reader.read(1 << 16):
        stamps += [time.monotonic_ns()] * chunk.count(b'"text":')
        got = (got + chunk)[-64:]
    if len(stamps) != _NEW_TOKENS or b"[DONE]" not in got:
        raise StudyError(f"a request got {len(stamps)} tokens and ended in {got!r}")
    return Stream(t_send_ns, t_sent_ns, stamps)


async def _send_all(port: int) -> list[Stream]:
    """All prompts at once, in their order, each on a connection opened before."""
    payloads = [payload(p, _NEW_TOKENS, b"connection: close\r\n") for p in prompts()]
    connections = [await asyncio.open_connection("127.0.0.1", port) for _ in payloads]
    receiving = []
    for request, (reader, writer) in zip(payloads, connections, strict=True):
        t_send_ns = time.monotonic_ns()
        writer.write(request)
        receiving.append(_receive(t_send_ns, time.monotonic_ns(), reader))
    try:
        return await asyncio.gather(*receiving)
    finally:
        for _, writer in connections:
            writer.close()


async def _run(policy: str, base: dict[str, Any], output: Path) -> dict[str, Any]:
    config = {
        "label": f"{base['label']}; step cost after the source's GPT-2",
        "model": base["model"],
        "scheduler": {**base["scheduler"], **_SCHEDULER, **_POLICIES[policy]},
        "step_cost": _STEP_COST,
        "connectors": {"plain": None},
    }
    path = output / f"engine_{policy}.json"
    write_json(path, config)
    async with running(path) as engine:
        return summarize(await _send_all(engine.port))


def table(measured: dict[str, dict[str, Any]], replayed: dict[str, dict[str, Any]]) -> str:
    """Both policies, measured, replayed and in the source, and the change from fifo to pack."""
    sides = (measured, replayed, _SOURCE)
    rows = [
        f"{_REQUESTS} requests, {_NEW_TOKENS} new tokens, prefill budget 256, batch 8; embedded "
        f"engine (emulated, median of {_RUNS} runs), replay (virtual time), source (GPT-2)",
        "",
        f"{'':18}" + "".join(f"{name:^30}" for name in ("emulated", "replay", "source")).rstrip(),
        f"{'':18}" + f"{'fifo':>10}{'pack':>10}{'change':>10}" * 3,
        _row("submit wall ms", [_pair(side, "submit_wall_ms") for side in sides]),
    ]
    for key, name in _NAMES.items():
        for i, percentile in enumerate(("p50", "p95", "p99")):
            pairs = [_pair(side, key, i) for side in sides]
            rows.append(_row(f"{name} {percentile} ms", pairs, 2 if key == "add_request_ms" else 1))
    rows.append(_row("tokens/s", [_pair(side, "throughput_tokens_s") for side in sides]))
    return "\n".join([*rows, "", _FITTED])


_Pair = tuple[float, float] | None


def _pair(side: dict[str, dict[str, Any]], key: str, place: int | None = None) -> _Pair:
    """fifo's and pack's value, or None where the side has none."""
    fifo, pack = side["fifo"][key], side["pack"][key]
    if fifo is None:
        return None
    return (fifo, pack) if place is None else (fifo[place], pack[place])


def _row(name: str, pairs: list[_Pair], digits: int = 1) -> str:
    cells = [
        f"{'-':>10}{'-':>10}{'-':>10}"
        if pair is None
        else f"{pair[0]:10.{digits}f}{pair[1]:10.{digits}f}{100 * (pair[1] / pair[0] - 1):+9.1f}%"
        for pair in pairs
    ]
    return f"{name:18}" + "".join(cells)


async def _study(base: dict[str, Any], output: Path) -> dict[str, dict[str, Any]]:
    runs: dict[str, list[dict[str, Any]]] = {policy: [] for policy in _POLICIES}
    for _ in range(_RUNS):
        for policy, results in runs.items():
            results.append(await _run(policy, base, output))
    return {policy: _median(results) for policy, results in runs.items()}


def _median(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {key: np.median([run[key] for run in runs], axis=0).tolist() for key in runs[0]}


def main() -> int:
    """Run both policies, write and print the tables; the process's exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.admission", description=__doc__)
    parser.add_argument("--config", type=Path, default=Path("config/embedded.yaml"))
    parser.add_argument("--output", type=Path, required=True, help="folder for the results")
    arguments = parser.parse_args()
    try:
        measured = asyncio.run(_study(load_yaml(arguments.config), arguments.output))
    except (ConfigError, EngineStartError, StudyError) as error:
        print(f"admission study: {error}", file=sys.stderr)
        return 1
    in_replay = {policy: replayed(policy) for policy in _POLICIES}
    text = table(measured, in_replay)
    write_text(arguments.output / "admission.txt", text)
    write_json(
        arguments.output / "admission.json",
        {
            "engine_label": "embedded (emulated)",
            "runs": _RUNS,
            "measured": measured,
            "replayed": in_replay,
            "source": _SOURCE,
        },
    )
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(run_alone(main))
