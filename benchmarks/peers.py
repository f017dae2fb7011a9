"""The same load from this load generator and from its peers, against the same server.

    python -m benchmarks.peers --peer aiperf=PATH --peer guidellm=PATH
    python -m benchmarks.peers --places 8,64 --peer ...

Each client is one command, pinned whole to one CPU; the C event server has another. Arrivals are
the same for all: constant rate, one short prompt, `--tokens` events each; with `--places`, closed
loops of so many requests at once instead. The server's log gives the truth: when requests arrived
and when each one's first token was written. CPU time is that of the client's whole process tree
between first arrival and last write, sampled every 100 ms.

`--peer NAME=PROGRAM` names the program of an installed peer; a peer without one is listed as not
installed. Peers need a tokenizer (`--tokenizer`, a local folder in Hugging Face's format).
"""

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks import run_alone
from benchmarks.event_server import EventServer, two_cpus
from connector_tax.machine import machine

SUSTAINED_RATE = 0.99
SUSTAINED_TTFT_ERROR_MS = 10.0
GAP_US, FIRST_US = 10_000.0, 1000.0
ON_TIME_NS = 1_000_000
COMMAND_TIMEOUT_S = 180.0


@dataclass(frozen=True)
class Job:
    """One client run: at `rate_rps`, or in closed loop, `places` at once."""

    port: int
    rate_rps: float
    places: int
    count: int
    tokens: int
    tokenizer: str
    folder: Path

    @property
    def url(self) -> str:
        """The server."""
        return f"http://127.0.0.1:{self.port}"


@dataclass(frozen=True)
class OwnWord:
    """Share of requests that left within 1 ms of their due time; p99 of the distance of a first
    token's stamp from the server's write, request by request, in ms; the main process's share of a
    CPU.
    """

    on_time: float
    stamp_p99_ms: float
    main_share: float


@dataclass(frozen=True)
class Client:
    """How to start a client and where it reports TTFT p50 and p99 in ms.

    `own`: what only this load generator says of itself, beside the server's log by request id.
    """

    name: str
    command: Callable[[str, Job], list[str]]
    ttft_ms: Callable[[Job], tuple[float, float]]
    own: "Callable[[Job, dict[str, list[int]]], OwnWord] | None" = None


def _own_command(_program: str, job: Job) -> list[str]:
    load = ["--rate", f"{job.rate_rps!r}", "--arrivals", "fixed", "--connections", "2048"]
    if job.places:
        load = ["--concurrency", f"{job.places}"]
    return [
        *(sys.executable, "-m", "connector_tax.loadgen", "--url", job.url, "--model", "m"),
        *(*load, "--requests", f"{job.count}", "--prompt-tokens", "8"),
        *("--max-tokens", f"{job.tokens}", "--ignore-eos", "--no-affinity"),
        *("--output", str(job.folder / "own.jsonl")),
        *("--summary", str(job.folder / "summary.json")),
    ]


def _own_records(job: Job) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (job.folder / "own.jsonl").read_text().splitlines()]


def _own_word(job: Job, truth: dict[str, list[int]]) -> OwnWord:
    records = _own_records(job)
    lags_ns = [(r["t_send_ns"] or math.inf) - r["t_intended_ns"] for r in records]
    errors_ns = [
        abs(r["t_first_token_ns"] - truth[r["request_id"]][1])
        for r in records
        if r["status"] == "ok"
    ]
    summary = json.loads((job.folder / "summary.json").read_text())
    return OwnWord(
        float(np.mean(np.array(lags_ns) < ON_TIME_NS)),
        float(np.percentile(errors_ns, 99)) / 1e6,
        float(summary["load_generator"]["processes"]["main"]["cpu_share"]),
    )


def _own_ttft(job: Job) -> tuple[float, float]:
    records = _own_records(job)
    ttft = [(r["t_first_token_ns"] - r["t_send_ns"]) / 1e6 for r in records if r["status"] == "ok"]
    return float(np.percentile(ttft, 50)), float(np.percentile(ttft, 99))


def _prompts(job: Job) -> Path:
    path = job.folder / "prompts.jsonl"
    line: dict[str, object] = {"text": "w3 w4 w5 w6 w7 w8 w9", "output_tokens_count": job.tokens}
    line["prompt"] = line["text"]
    path.write_text((json.dumps(line) + "\n") * max(job.count, 1))
    return path


def _aiperf_command(program: str, job: Job) -> list[str]:
    return [
        *(program, "profile", "--model", "m", "--url", job.url, "--ui", "none"),
        *("--endpoint-type", "completions", "--streaming", "--use-server-token-count"),
        *("--use-legacy-max-tokens", "--extra-inputs", f"max_tokens:{job.tokens}"),
        *(
            ("--concurrency", f"{job.places}")
            if job.places
            else ("--request-rate", f"{job.rate_rps!r}", "--request-rate-mode", "constant")
        ),
        *("--request-count", f"{job.count}", "--tokenizer", job.tokenizer),
        *("--input-file", str(_prompts(job)), "--custom-dataset-type", "single_turn"),
        *("--artifact-dir", str(job.folder)),
    ]


def _aiperf_ttft(job: Job) -> tuple[float, float]:
    report = json.loads((job.folder / "profile_export_aiperf.json").read_text())
    ttft = report["time_to_first_token"]
    return float(ttft["p50"]), float(ttft["p99"])


def _guidellm_command(program: str, job: Job) -> list[str]:
    backend = f"kind=openai_http,target={job.url},model=m,request_format=/v1/completions"
    return [
        *(program, "run", "--backend", backend, "--disable-console"),
        *(
            ("--profile", f"kind=concurrent,streams={job.places}")
            if job.places
            else ("--profile", f"kind=constant,rate={job.rate_rps!r}")
        ),
        *("--constraint", f"kind=max_requests,count={job.count}"),
        *("--data", f"kind=json_file,path={_prompts(job)}"),
        *("--tokenizer", f"kind=hf_auto,model={job.tokenizer}"),
        *("--output", f"kind=json,path={job.folder / 'guidellm.json'}"),
    ]


def _guidellm_ttft(job: Job) -> tuple[float, float]:
    report = json.loads((job.folder / "guidellm.json").read_text())
    metrics = report["benchmarks"][0]["metrics"]
    percentiles = metrics["time_to_first_token_ms"]["successful"]["percentiles"]
    return float(percentiles["p50"]), float(percentiles["p99"])


def _vllm_command(program: str, job: Job) -> list[str]:
    return [
        *(program, "bench", "serve", "--base-url", job.url, "--model", "m"),
        *("--tokenizer", job.tokenizer, "--dataset-name", "random", "--ignore-eos"),
        *("--random-input-len", "8", "--random-output-len", f"{job.tokens}"),
        *(
            ("--max-concurrency", f"{job.places}")
            if job.places
            else ("--request-rate", f"{job.rate_rps!r}", "--burstiness", "1000000")
        ),
        *("--num-prompts", f"{job.count}", "--percentile-metrics", "ttft"),
        *("--metric-percentiles", "50,99", "--save-result", "--disable-tqdm"),
        *("--result-dir", str(job.folder), "--result-filename", "vllm.json"),
    ]


def _vllm_ttft(job: Job) -> tuple[float, float]:
    report = json.loads((job.folder / "vllm.json").read_text())
    return float(report["p50_ttft_ms"]), float(report["p99_ttft_ms"])


OWN = "this load generator"
CLIENTS = {
    client.name: client
    for client in (
        Client(OWN, _own_command, _own_ttft, _own_word),
        Client("aiperf", _aiperf_command, _aiperf_ttft),
        Client("guidellm", _guidellm_command, _guidellm_ttft),
        Client("vllm bench serve", _vllm_command, _vllm_ttft),
    )
}
NOT_ON_PYPI = ("MLPerf endpoints (inference-endpoint)",)


def _tree(pid: int) -> list[int]:
    """A process and all its descendants.

    psutil looks at every process of the machine for this: milliseconds of the client's CPU.
    """
    tree = [pid]
    for parent in tree:
        for listed in Path(f"/proc/{parent}/task").glob("*/children"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                tree += map(int, listed.read_text().split())
    return tree


class _TreeSampler(threading.Thread):
    """Samples CPU seconds and resident memory of a process and all its descendants."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._root = pid
        self._seconds: dict[int, float] = {}
        self.series: list[tuple[int, float]] = []
        self.peak_mb = 0.0
        self.ended = threading.Event()

    def run(self) -> None:
        """Sample until told to end; CPU time of processes that ended is kept."""
        while not self.ended.wait(0.1):
            memory = 0
            for pid in _tree(self._root):
                try:
                    process = psutil.Process(pid)
                    times = process.cpu_times()
                    memory += process.memory_info().rss
                except (psutil.NoSuchProcess, psutil.ZombieProcess):
                    continue
                self._seconds[pid] = times.user + times.system
            self.peak_mb = max(self.peak_mb, memory / 1e6)
            self.series.append((time.monotonic_ns(), sum(self._seconds.values())))

    def between(self, begin_ns: int, end_ns: int) -> float:
        """Return the CPU seconds used between two moments."""
        stamps, seconds = zip(*self.series, strict=True)
        begin, end = np.interp([begin_ns, end_ns], stamps, seconds)
        return float(end - begin)


@dataclass(frozen=True)
class Row:
    """What one client did at one event rate; in closed loop, at the rate that came of it."""

    client: str
    events_per_s: float
    requests_per_s: float
    achieved: float
    error_p50_ms: float
    error_p99_ms: float
    cpu_s_per_1000: float
    peak_mb: float
    own: OwnWord | None

    def sustains(self, error_ms: float) -> bool:
        """True if the client kept the rate and its clock did not fall behind."""
        return self.achieved >= SUSTAINED_RATE and abs(self.error_p99_ms) <= error_ms

    def cells(self) -> list[str]:
        """Return the row as text."""
        return [
            self.client,
            f"{self.events_per_s:,.0f}",
            f"{self.requests_per_s:,.0f}",
            f"{self.achieved:.3f}",
            f"{self.error_p50_ms:+.2f}",
            f"{self.error_p99_ms:+.2f}",
            f"{self.cpu_s_per_1000:.2f}",
            f"{1000 / self.cpu_s_per_1000:,.0f}",
            f"{self.peak_mb:.0f}",
            "yes" if self.sustains(SUSTAINED_TTFT_ERROR_MS) else "no",
        ]


def measure(
    client: Client,
    program: str,
    events_per_s: float,
    tokens: int,
    seconds: float,
    tokenizer: str,
    cpus: Sequence[int],
    places: int = 0,
) -> Row | str:
    """Run one client on `cpus` at one rate, or with `places` requests at once.

    Return its row, or why there is none.
    """
    _, server_cpu = two_cpus()
    if places:
        # As fast as a client that loses no time between two requests.
        events_per_s = places * tokens / ((FIRST_US + GAP_US * (tokens - 1)) / 1e6)
    rate_rps = events_per_s / tokens
    count = max(20, round(rate_rps * seconds))
    with tempfile.TemporaryDirectory(prefix="connector-tax-peer-") as folder:
        with EventServer(GAP_US, FIRST_US, server_cpu) as server:
            job = Job(server.port, rate_rps, places, count, tokens, tokenizer, Path(folder))
            process = subprocess.Popen(
                ["taskset", "-c", ",".join(map(str, cpus)), *client.command(program, job)],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
            )
            sampler = _TreeSampler(process.pid)
            sampler.start()
            try:
                process.wait(COMMAND_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
                process.kill()
                process.wait()
            sampler.ended.set()
            sampler.join()
        try:
            p50, p99 = client.ttft_ms(job)
            own = None if client.own is None else client.own(job, server.truth)
        except (OSError, KeyError, ValueError) as error:
            return f"no result (exit status {process.returncode}): {type(error).__name__}"
    # A client may send a request of its own ahead of the load, to see that the server answers.
    truth = sorted(server.responses)[-count:]
    if len(truth) < 2:
        return "the server saw no requests"
    arrivals = np.array([stamps[0] for stamps in truth])
    span_s = float(arrivals[-1] - arrivals[0]) / 1e9
    requests_per_s = min(len(truth) / count, 1.0) * (len(truth) - 1) / span_s
    true_ttft = [(stamps[1] - stamps[0]) / 1e6 for stamps in truth]
    busy_s = sampler.between(int(arrivals[0]), max(stamps[-1] for stamps in truth))
    return Row(
        client.name,
        events_per_s,
        requests_per_s,
        requests_per_s / rate_rps,
        p50 - float(np.percentile(true_ttft, 50)),
        p99 - float(np.percentile(true_ttft, 99)),
        busy_s / len(truth) * 1000,
        sampler.peak_mb,
        own,
    )


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PROGRAM")
    parser.add_argument(
        "--tokenizer",
        default="tokenizer",
        help="folder, or a name in the Hugging Face cache, which AIPerf insists on",
    )
    parser.add_argument("--rates", default="1000,5000,20000,40000,60000,80000", help="events/s")
    parser.add_argument("--places", help="closed loops of so many requests at once, in their place")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=4.0)
    options = parser.parse_args()
    programs = dict(text.partition("=")[::2] for text in options.peer)
    unknown = set(programs) - set(CLIENTS)
    if unknown:
        parser.error(f"--peer: {sorted(unknown)} unknown; allowed: {sorted(CLIENTS)}")
    table = Table(
        *("client", "events/s", "requests/s", "sent/plan", "TTFT p50 error ms", "p99 error ms"),
        *("CPU s / 1000 requests", "requests / CPU s", "peak MB", "sustained"),
    )
    notes = [f"{name}: not on PyPI" for name in NOT_ON_PYPI]
    loads = [(float(text), 0) for text in options.rates.split(",")]
    if options.places:
        loads = [(0.0, int(text)) for text in options.places.split(",")]
    for name, client in CLIENTS.items():
        if name != OWN and name not in programs:
            notes.append(f"{name}: not installed here")
            continue
        highest = 0.0
        for events_per_s, places in loads:
            row = measure(
                client,
                programs.get(name, ""),
                events_per_s,
                options.tokens,
                options.seconds,
                options.tokenizer,
                two_cpus()[:1],
                places,
            )
            if isinstance(row, str):
                notes.append(f"{name} at {places or events_per_s:,.0f}: {row}")
                break
            table.add_row(*row.cells())
            if row.sustains(SUSTAINED_TTFT_ERROR_MS):
                highest = row.events_per_s
            elif not places and events_per_s > 5 * max(highest, 1000):
                break
        if not options.places:
            notes.append(f"{name}: sustained {highest:,.0f} events/s")
        table.add_section()
    console = Console(width=130, highlight=False)
    console.print(machine("uvloop"))
    load = "closed loop" if options.places else "constant rate"
    console.print(
        f"one CPU for each client, one for the server; {load}, {options.tokens} events "
        f"{GAP_US / 1e3:g} ms apart, {options.seconds:g} s per row; sustained: sent/plan >= "
        f"{SUSTAINED_RATE} and TTFT p99 error within {SUSTAINED_TTFT_ERROR_MS:g} ms"
    )
    console.print(table)
    for note in notes:
        console.print(note)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_alone(main))
