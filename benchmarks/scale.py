"""The most a client can do by workers, beside its peers: short answers and streams of 64 tokens.

    python -m benchmarks.scale --peer "vllm bench serve=PATH" --tokenizer FOLDER

Each client has the CPUs --client-cpus (all but the last one), and the C event server has the last.
The rate rises by a quarter at a time until it is not sustained: at least 99% of it sent, and TTFT
p99 within --error-ms of the server's log, in one of two tries. Each client then runs once more, at
half its best. The server counts from when it reads a request, a client from when it sends one, so
that a busy server's delay stands in the error of every client; of this load generator there is also
what its stamps alone are off by: its first-token stamp against the server's write.

Workers share CPUs where there are more of them than CPUs. What more CPUs would bring is not
measured: the model at the end takes a worker on a CPU of its own for as good as the one measured,
until the main process, whose share of a CPU is known, is full.
"""

import argparse
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from benchmarks.event_server import client_cpus
from benchmarks.peers import CLIENTS, OWN, Client, Job, Row, measure
from connector_tax.machine import machine

STEP = 1.25
# How often a rate is tried before it is not sustained: one stall of the machine is no verdict.
TRIES = 2
MAIN_SHARE_MAX = 0.9
MODELLED = (2, 4, 8)


@dataclass(frozen=True)
class Shape:
    """One kind of answer, and the rate to begin with."""

    name: str
    tokens: int
    first_rps: float


SHAPES = (Shape("short answers", 1, 200.0), Shape("64-token streams", 64, 20.0))


def with_workers(workers: int) -> Client:
    """This load generator with so many workers."""
    own = CLIENTS[OWN]

    def command(program: str, job: Job) -> list[str]:
        return [*own.command(program, job), "--workers", str(workers)]

    return replace(own, name=f"{OWN}, {workers} workers", command=command)


def best_of(client: Client, program: str, shape: Shape, options: argparse.Namespace) -> list[Row]:
    """The row of the highest rate that is sustained, and that of half of it; none: no rate is."""
    cpus = client_cpus(options.client_cpus)

    def run(rate_rps: float) -> Row | None:
        row = measure(
            client, program, rate_rps * shape.tokens, shape.tokens, options.seconds,
            options.tokenizer, cpus,
        )  # fmt: skip
        if isinstance(row, str):
            print(f"{client.name} at {rate_rps:,.0f} requests/s: {row}")
            return None
        return row

    best: Row | None = None
    rate_rps = shape.first_rps
    failed = 0
    while failed < TRIES:
        row = run(rate_rps)
        if row is not None and row.sustains(options.error_ms):
            best, failed = row, 0
            rate_rps *= STEP
        else:
            failed += 1
    if best is None:
        return []
    half = run(best.events_per_s / shape.tokens / 2)
    return [best] if half is None else [best, half]


def cells(shape: Shape, best: Row, half: Row | None) -> list[str]:
    """A row of the table."""
    own = None if half is None else half.own
    return [
        best.client,
        shape.name,
        f"{best.events_per_s / shape.tokens:,.0f}",
        f"{best.events_per_s:,.0f}",
        f"{best.error_p99_ms:+.2f}",
        "-" if half is None else f"{half.error_p99_ms:+.3f}",
        "-" if own is None else f"{own.stamp_p99_ms:.3f}",
        "-" if own is None else f"{own.on_time:.4f}",
        f"{best.cpu_s_per_1000:.2f}",
        f"{best.peak_mb:.0f}",
    ]


def model(shape: Shape, one: Row) -> str:
    """What more workers would do, each on a CPU of its own."""
    assert one.own is not None
    rate_rps = one.events_per_s / shape.tokens
    most_rps = rate_rps * MAIN_SHARE_MAX / one.own.main_share
    said = ", ".join(f"{n} workers {min(n * rate_rps, most_rps):,.0f}" for n in MODELLED)
    return (
        f"model, not measured, {shape.name}: {said} requests/s (main process "
        f"{one.own.main_share:.2f} of a CPU at {rate_rps:,.0f}, full at {most_rps:,.0f})"
    )


def main() -> int:
    """Print the table; exit status 1 if this load generator sustained nothing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PROGRAM")
    parser.add_argument("--tokenizer", default="tokenizer", help="a local folder, for peers")
    parser.add_argument("--workers", default="1,2", help="of this load generator")
    parser.add_argument("--client-cpus", help="such as 0,1; default: all but the last")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each run")
    parser.add_argument("--error-ms", type=float, default=10.0)
    options = parser.parse_args()
    programs = dict(text.partition("=")[::2] for text in options.peer)
    if unknown := set(programs) - set(CLIENTS):
        parser.error(f"--peer: {sorted(unknown)} unknown; allowed: {sorted(CLIENTS)}")
    clients = [(with_workers(int(n)), "") for n in options.workers.split(",")]
    clients += [(CLIENTS[name], program) for name, program in programs.items()]
    table = Table(
        *("client", "answers", "requests/s", "events/s", "TTFT p99 error ms", "at half"),
        *(
            "stamp p99 error ms, at half",
            "in 1 ms of due, at half",
            "CPU s / 1000 requests",
            "peak MB",
        ),
    )
    models = []
    for shape in SHAPES:
        for client, program in clients:
            rows = best_of(client, program, shape, options)
            if not rows:
                table.add_row(client.name, shape.name, "none", *["-"] * 7)
                continue
            table.add_row(*cells(shape, rows[0], rows[1] if len(rows) > 1 else None))
            if client is clients[0][0]:
                models.append(model(shape, rows[0]))
        table.add_section()
    console = Console(width=140, highlight=False)
    console.print(machine())
    console.print(
        f"clients on CPUs {client_cpus(options.client_cpus)}, one for the server; "
        f"{options.seconds:g} s per run; sustained: 99% sent and TTFT p99 error within "
        f"{options.error_ms:g} ms"
    )
    console.print(table)
    for line in models:
        console.print(line)
    return 0 if models else 1


if __name__ == "__main__":
    raise SystemExit(main())
