"""Compare the load generator's stamps with true times, and find its highest event rate.

The C event server runs on one CPU and logs the time of each token event; the client runs on another
CPU. For each event rate: error of the reported first token, last token and ITL (client minus
server, us), schedule lag, achieved rate. Rates rise until the schedule is lost.
"""

import json
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks import machine, parser_of, run_alone
from benchmarks.event_server import GAP_US, EventServer, two_cpus
from connector_tax.loadgen.affinity import AffinityPlan, read_topology
from connector_tax.loadgen.generator import CellResult, LoadGenerator, LoadGeneratorOptions
from connector_tax.loadgen.messages import RequestRecord, Target
from connector_tax.loadgen.plan import CellRule, open_loop
from connector_tax.loadgen.sessions import PlannedRequest
from connector_tax.loadgen.traffic import make_offsets

Floats = NDArray[np.float64]
LOST_SCHEDULE_MAX = 0.01
PROMPT_TOKENS = 16


def run_point(
    events_per_s: float, tokens: int, seconds: float
) -> tuple[CellResult, dict[str, list[int]]]:
    """Run one cell; return its result and the server's times by request id."""
    client_cpu, server_cpu = two_cpus()
    cpus = AffinityPlan((client_cpu,), ((client_cpu,),), (server_cpu,), True, (), read_topology())
    rate = events_per_s / tokens
    rule = CellRule(
        warmup_s=0.5, floor_s=seconds, min_completed=0, cap_s=seconds, drain_s=5.0,
        inflight_cap=4000, request_timeout_s=30.0,
    )  # fmt: skip
    offsets = make_offsets("poisson", rate, rule.warmup_s + rule.cap_s, "1/truth")
    requests = [
        PlannedRequest(f"t{k}", _body(k, tokens), PROMPT_TOKENS, tokens)
        for k in range(len(offsets))
    ]
    inflight = round(rate * tokens * GAP_US / 1e6 * 1.5) + 32
    options = LoadGeneratorOptions(
        workers=1, connections_per_worker=min(inflight, 4000), cpus=cpus, strict=True
    )
    with (
        EventServer(server_cpu) as server,
        LoadGenerator(Target("127.0.0.1", server.port), options) as generator,
    ):
        result = generator.run(open_loop(offsets, requests, rule), rule)
    return result, server.truth


def _body(k: int, tokens: int) -> bytes:
    prompt = [(k * PROMPT_TOKENS + i) % 997 + 1 for i in range(PROMPT_TOKENS)]
    body = {"prompt": prompt, "max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True}
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    return json.dumps(body | stream).encode()


def errors_us(records: Sequence[RequestRecord], truth: dict[str, list[int]]) -> dict[str, Floats]:
    """Return client minus server in us: first token, last token, and each ITL."""
    first, last, itl = [], [], []
    for record in records:
        if record.status != "ok" or not record.measured:
            continue
        writes = truth[record.request_id][1:]
        assert record.t_first_token_ns is not None
        assert record.t_last_token_ns is not None
        assert record.reads is not None
        first.append(record.t_first_token_ns - writes[0])
        last.append(record.t_last_token_ns - writes[-1])
        stamps = [t_ns for t_ns, events in record.reads for _ in range(events)]
        itl.append(np.diff(stamps) - np.diff(writes))
    columns = {"first": first, "last": last, "itl": np.abs(np.concatenate(itl))}
    return {name: np.array(values) / 1e3 for name, values in columns.items()}


def kept_schedule(result: CellResult) -> bool:
    """Return whether at most 1% of the requests failed, were dropped, or left 2 ms late."""
    good = sum(
        r.status == "ok" and r.t_send_ns is not None and r.t_send_ns - r.t_intended_ns < 2e6
        for r in result.records
    )
    return good >= (1 - LOST_SCHEDULE_MAX) * len(result.records)


def _cells(values: Floats) -> str:
    if not len(values):  # answers of one token have no ITL
        return ""
    p50, p90, p99 = np.percentile(values, [50, 90, 99])
    return f"{p50:.0f}/{p90:.0f}/{p99:.0f}"


def _row(events_per_s: float, result: CellResult, truth: dict[str, list[int]]) -> list[str]:
    errors = errors_us(result.records, truth)
    measured = [r for r in result.records if r.measured]
    lag = np.array([(r.t_send_ns or 0) - r.t_intended_ns for r in measured if r.t_send_ns]) / 1e3
    sends = sorted(r.t_send_ns for r in measured if r.t_send_ns)
    dues = [r.t_intended_ns for r in measured]
    achieved = len(sends) / len(dues) * (dues[-1] - dues[0]) / (sends[-1] - sends[0])
    reads = sum(len(r.reads or ()) for r in measured)
    events = sum(r.completion_tokens or 0 for r in measured if r.status == "ok")
    processes = result.health["processes"]
    return [
        f"{events_per_s:,.0f}",
        result.clock,
        _cells(errors["first"]),
        _cells(errors["last"]),
        _cells(errors["itl"]),
        _cells(lag),
        f"{achieved:.4f}",
        f"{events / max(reads, 1):.2f}",
        f"{processes['worker0']['cpu_share']:.2f}+{processes['main']['cpu_share']:.2f}",
        f"{processes['worker0']['loop_lag_p99_ms']:.2f}",
        "yes" if kept_schedule(result) else "LOST",
    ]


def main() -> int:
    """Print the table; return 1 if not even the lowest rate was sustained."""
    parser = parser_of(__file__, __doc__)
    parser.add_argument("--rates", default="1000,5000,20000,40000,60000,80000,100000,120000")
    parser.add_argument("--tokens", type=int, default=64, help="token events per request")
    parser.add_argument("--seconds", type=float, default=4.0, help="measured window per cell")
    options = parser.parse_args()
    table = Table(
        *("events/s", "stamps", "first token µs", "last token µs", "|ITL| µs", "lag µs"),
        *("sent/plan", "events/read", "CPU worker+main", "loop lag p99 ms", "kept"),
        title="error against the server's own log, p50/p90/p99",
    )
    limit = 0.0
    for events_per_s in (float(text) for text in options.rates.split(",")):
        result, truth = run_point(events_per_s, options.tokens, options.seconds)
        table.add_row(*_row(events_per_s, result, truth))
        if not kept_schedule(result):
            break
        limit = events_per_s
    console = Console(width=150, highlight=False)
    console.print(machine("uvloop"))
    console.print(
        f"client on one CPU, server on another; {options.tokens} events per request, "
        f"{GAP_US / 1e3:g} ms apart, Poisson arrivals, {options.seconds:g} s per row"
    )
    console.print(table)
    console.print(f"highest rate with at most 1% lost schedule: {limit:,.0f} events/s")
    return 0 if limit else 1


if __name__ == "__main__":
    raise SystemExit(run_alone(main))
