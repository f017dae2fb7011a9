"""Compare the admission policies fifo and pack: repeat a GPT-2 experiment on the embedded engine.

128 requests arrive at once, with prompts of 515, 4, 4, 4 tokens in turn (the source's 512, 1, 1, 1,
plus three tokens that make each prompt unique) and 32 new tokens each. The prefill budget is 256
tokens per round, a decode step has 8 sequences. fifo and pack (with a forced FIFO round every 8)
take turns, three runs each on a fresh engine; medians over the runs are printed with the source's
tables.

Fitted to the source: a decode step of 8 (delta + beta0 + 8 beta2 = 10.7 ms) to fifo's throughput,
beta1 to the change of TTFT p99. The source computes prefill and decode in their own passes, its
first pass is slow, and its requests come one after the other: from these come its tail of ITL and
pack's median TTFT.
"""

import asyncio
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import machine, parser_of, run_alone
from benchmarks.running import payload, running
from connector_tax.config import ROOT, load_yaml
from connector_tax.files import write_json

_REQUESTS, _NEW_TOKENS, _RUNS = 128, 32, 3
_REPEATS = (512, 1, 1, 1)
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
_STEP_COST = {
    "delta_us": 400.0,
    "beta0_us": 8900.0,
    "beta1_us_per_prefill_token": 4.0,
    "beta2_us_per_decode_seq": 175.0,
    "beta3_us_per_kv_token": 0.0,
    "jitter_rel_sd": 0.01,
    "launch_offset_rel_sd": 0.0,
}
_NAMES = [f"{name} {p}" for name in ("TTFT", "TPOT", "ITL", "latency") for p in (50, 95, 99)]
# The source's results: percentiles in ms, throughput in completion tokens/s.
_SOURCE = {
    "fifo": dict(zip([*_NAMES, "tokens/s"], [
        672.29, 1106.39, 1144.49, 142.26, 145.73, 146.08,
        152.93, 160.77, 189.82, 5184.35, 5341.20, 5347.30, 751.55,
    ], strict=True)),
    "pack": dict(zip([*_NAMES, "tokens/s"], [
        216.77, 611.07, 689.69, 156.40, 158.05, 158.17,
        155.06, 190.19, 221.63, 5086.20, 5258.17, 5263.87, 763.48,
    ], strict=True)),
}  # fmt: skip
Figures = dict[str, float]


class Stream(NamedTuple):
    """The times of a request (CLOCK_MONOTONIC, ns): its write, and the read of each token."""

    t_send_ns: int
    tokens_ns: list[int]


def prompts() -> list[list[int]]:
    """Return the prompts' token ids; all have different beginnings."""
    lengths = [_REPEATS[i % len(_REPEATS)] for i in range(_REQUESTS)]
    return [[i, 1000 + i, 2000 + i, *[7] * length] for i, length in enumerate(lengths)]


def summarize(streams: list[Stream]) -> Figures:
    """Return those statistics of a run that the source also reports."""
    send, tokens = (np.array(stamps) for stamps in zip(*streams, strict=True))
    first, last = tokens[:, 0], tokens[:, -1]
    per_token = (last - first) / (_NEW_TOKENS - 1)
    samples = (first - send, per_token, np.diff(tokens).ravel(), last - send)
    values = np.ravel([np.percentile(ns / 1e6, [50, 95, 99]) for ns in samples]).tolist()
    span_s = float(last.max() - send.min()) / 1e9
    return {**dict(zip(_NAMES, values, strict=True)), "tokens/s": tokens.size / span_s}


async def _receive(t_send_ns: int, reader: asyncio.StreamReader) -> Stream:
    stamps: list[int] = []
    got = b""
    while chunk := await reader.read(1 << 16):
        stamps += [time.monotonic_ns()] * chunk.count(b'"text":')
        got = (got + chunk)[-64:]
    if len(stamps) != _NEW_TOKENS or b"[DONE]" not in got:
        raise RuntimeError(f"a request got {len(stamps)} tokens and ended in {got!r}")
    return Stream(t_send_ns, stamps)


async def _send_all(port: int) -> list[Stream]:
    """Send all prompts at once in order, each on a connection opened before."""
    payloads = [payload(p, _NEW_TOKENS, b"connection: close\r\n") for p in prompts()]
    connections = [await asyncio.open_connection("127.0.0.1", port) for _ in payloads]
    receiving = []
    for request, (reader, writer) in zip(payloads, connections, strict=True):
        t_send_ns = time.monotonic_ns()
        writer.write(request)
        receiving.append(_receive(t_send_ns, reader))
    try:
        return await asyncio.gather(*receiving)
    finally:
        for _, writer in connections:
            writer.close()


def _run(policy: str) -> Figures:
    base = load_yaml(ROOT / "config/embedded.yaml")
    scheduler = {**base["scheduler"], **_SCHEDULER, **_POLICIES[policy]}
    settings = {"scheduler": scheduler, "step_cost": _STEP_COST, "connectors": {"plain": None}}
    with tempfile.TemporaryDirectory(prefix="admission-") as folder:
        path = Path(folder, "engine.json")
        write_json(path, {"label": base["label"], "model": base["model"], **settings})
        with running(path) as engine:
            return summarize(asyncio.run(_send_all(engine.port)))


def measured() -> dict[str, Figures]:
    """Return each policy's statistics as medians over the runs."""
    runs: dict[str, list[Figures]] = {policy: [] for policy in _POLICIES}
    for _ in range(_RUNS):
        for policy, taken in runs.items():
            taken.append(_run(policy))
    return {
        policy: {name: float(np.median([run[name] for run in taken])) for name in taken[0]}
        for policy, taken in runs.items()
    }


def table(emulated: dict[str, Figures]) -> Table:
    """Return the statistics of both policies, emulated and from the source, and their change."""
    sides = {"emulated": emulated, "source": _SOURCE}
    columns = [f"{side}: {what}" for side in sides for what in (*_POLICIES, "change")]
    shown = Table("", *columns, title="percentiles in ms")
    for name in _SOURCE["fifo"]:
        pairs = [(side["fifo"][name], side["pack"][name]) for side in sides.values()]
        cells = [(f"{f:.1f}", f"{p:.1f}", f"{100 * (p / f - 1):+.1f}%") for f, p in pairs]
        shown.add_row(name, *(cell for pair in cells for cell in pair))
    return shown


def main() -> None:
    """Run both policies and print the table."""
    parser_of(__file__, __doc__).parse_args()
    Console(width=110).print(machine(), table(measured()), sep="\n")


if __name__ == "__main__":
    sys.exit(run_alone(main))
