"""Compare this load generator with other clients under the same load on the same server.

    python -m benchmarks.peers --peer aiperf=PATH --peer "vllm bench serve=PATH" --tokenizer FOLDER
    python -m benchmarks.peers --places 8,64 --peer ...

Arrivals are the same for all: constant rate, one short prompt. The C event server has a CPU of its
own; its log gives the true times of arrivals and first tokens. The server counts from its read of a
request, a client from its send, so every client's error includes the delay of a busy server. CPU
time covers the client's process tree from first arrival to last write, sampled every 100 ms. Each
client is pinned to one CPU and runs at each rate, or in closed loops of each size.

`--peer NAME=PROGRAM` names the program of an installed peer; a peer without one is listed as not
installed. Peers need a tokenizer (`--tokenizer`, a local folder in Hugging Face's format).
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks import machine, parser_of, run_alone
from benchmarks.event_server import FIRST_US, GAP_US, EventServer, two_cpus

SUSTAINED_RATE, ERROR_MS = 0.99, 10.0
COMMAND_TIMEOUT_S = 180.0
PROMPT = "w3 w4 w5 w6 w7 w8 w9"

# ---- the clients


@dataclass(frozen=True)
class Client:
    """The command line of a client; each word is formatted with the load's values.

    Attributes:
        command: the words after the program.
        report: options that write the report for `ttft_ms`.
        rate: options for a constant rate.
        places: options for a closed loop.
        ttft_ms: reads TTFT p50 and p99 from its folder.
        file: its configuration, written as JSON to config.yml in its folder.
    """

    command: str
    report: str
    rate: str
    places: str
    ttft_ms: Callable[[Path], tuple[float, float]]
    file: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None

    def words(self, program: str, load: Mapping[str, Any]) -> list[str]:
        """Return the command line for a load."""
        text = f"{self.command} {self.report} {self.places if load['places'] else self.rate}"
        return [program, *(word.format_map(load) for word in text.split())]


def _own_ttft(folder: Path) -> tuple[float, float]:
    records = map(json.loads, (folder / "own.jsonl").read_text().splitlines())
    ttft = [(r["t_first_token_ns"] - r["t_send_ns"]) / 1e6 for r in records if r["status"] == "ok"]
    return float(np.percentile(ttft, 50)), float(np.percentile(ttft, 99))


def reported(file: str, *path: Any, p50: str = "p50", p99: str = "p99") -> Any:
    """Return a function that reads p50 and p99 from a peer's report, below the keys of `path`."""

    def read(folder: Path) -> tuple[float, float]:
        report = json.loads((folder / file).read_text())
        for key in path:
            report = report[key]
        return float(report[p50]), float(report[p99])

    return read


def _veeksha_file(load: Mapping[str, Any]) -> dict[str, Any]:
    """Return veeksha's configuration; it uses chat because veeksha's completions do not stream."""
    interval = {"type": "fixed", "interval": 1 / load["rate"]}
    traffic: dict[str, Any] = {"type": "rate", "interval_generator": interval}
    if load["places"]:
        traffic = {
            "type": "concurrent",
            "target_concurrent_sessions": load["places"],
            "rampup_seconds": 0,
        }
    one, tokens = {"type": "fixed", "value": 1}, {"type": "fixed", "value": load["tokens"]}
    words = {"type": "text", "body_length_generator": {"type": "fixed", "value": 8}}
    return {
        "output_dir": str(load["folder"]),
        "traffic_scheduler": traffic,
        "session_generator": {
            "type": "synthetic",
            "session_graph": {"type": "linear", "num_request_generator": one},
            "channels": [words],
            "output_spec": {"text": {"output_length_generator": tokens}},
        },
        "client": {
            "type": "openai_chat_completions",
            "model": load["tokenizer"],
            "api_base": f"{load['url']}/v1",
            "api_key": "none",
        },
        "runtime": {"max_sessions": load["count"], "benchmark_timeout": int(COMMAND_TIMEOUT_S)},
        "trace_recorder": {"enabled": False},
    }


def _veeksha_ttft(folder: Path) -> tuple[float, float]:
    (path,) = folder.glob("**/request_level_metrics.jsonl")
    ttft_s = [json.loads(line)["ttfc"] for line in path.read_text().splitlines()]
    ttft_ms = [1e3 * value for value in ttft_s if value is not None]
    if not ttft_ms:
        raise ValueError("no request was answered")
    return float(np.percentile(ttft_ms, 50)), float(np.percentile(ttft_ms, 99))


def _perf_analyzer_file(load: Mapping[str, Any]) -> dict[str, Any]:
    payload = {"model": "m", "prompt": PROMPT, "max_tokens": load["tokens"], "stream": True}
    return {"data": [{"payload": [payload | {"ignore_eos": True}]}]}


def _perf_analyzer_ttft(folder: Path) -> tuple[float, float]:
    (experiment,) = json.loads((folder / "requests.json").read_text())["experiments"]
    ttft_ms = [(r["response_timestamps"][0] - r["timestamp"]) / 1e6 for r in experiment["requests"]]
    return float(np.percentile(ttft_ms, 50)), float(np.percentile(ttft_ms, 99))


OWN = "this load generator"
CLIENTS = {
    OWN: Client(
        "-m connector_tax.loadgen --url {url} --model m --requests {count} --prompt-tokens 8"
        " --max-tokens {tokens} --ignore-eos --no-affinity",
        "--output {folder}/own.jsonl",
        "--rate {rate!r} --arrivals fixed --connections 2048",
        "--concurrency {places}",
        _own_ttft,
    ),
    "aiperf": Client(
        "profile --model m --url {url} --ui none --endpoint-type completions --streaming"
        " --use-server-token-count --use-legacy-max-tokens --extra-inputs max_tokens:{tokens}"
        " --request-count {count} --tokenizer {tokenizer} --input-file {prompts}"
        " --custom-dataset-type single_turn",
        "--artifact-dir {folder}",
        "--request-rate {rate!r} --request-rate-mode constant",
        "--concurrency {places}",
        reported("profile_export_aiperf.json", "time_to_first_token"),
    ),
    "guidellm": Client(
        "run --backend kind=openai_http,target={url},model=m,request_format=/v1/completions"
        " --disable-console --constraint kind=max_requests,count={count}"
        " --data kind=json_file,path={prompts} --tokenizer kind=hf_auto,model={tokenizer}",
        "--output kind=json,path={folder}/guidellm.json",
        "--profile kind=constant,rate={rate!r}",
        "--profile kind=concurrent,streams={places}",
        reported(
            "guidellm.json", "benchmarks", 0, "metrics", "time_to_first_token_ms", "successful",
            "percentiles",
        ),
    ),
    "vllm bench serve": Client(
        "bench serve --base-url {url} --model m --tokenizer {tokenizer} --dataset-name random"
        " --ignore-eos --random-input-len 8 --random-output-len {tokens} --num-prompts {count}"
        " --disable-tqdm",
        "--percentile-metrics ttft --metric-percentiles 50,99 --save-result --result-dir {folder}"
        " --result-filename vllm.json",
        "--request-rate {rate!r} --burstiness 1000000",
        "--max-concurrency {places}",
        reported("vllm.json", p50="p50_ttft_ms", p99="p99_ttft_ms"),
    ),
    "perf_analyzer": Client(
        "-m m --service-kind openai -u {address} --endpoint v1/completions --async"
        " --input-data {folder}/config.yml --request-count {count}",
        "--profile-export-file {folder}/requests.json",
        "--request-rate-range {rate!r} --request-distribution constant",
        "--concurrency-range {places}",
        _perf_analyzer_ttft,
        _perf_analyzer_file,
    ),
    "veeksha": Client(  # the program is the Python it is installed in
        "-m veeksha.benchmark --benchmark-config-from-file {folder}/config.yml",
        "",
        "",
        "",
        _veeksha_ttft,
        _veeksha_file,
    ),
}  # fmt: skip


def add_peers(parser: argparse.ArgumentParser) -> None:
    """Add the options that name peers."""
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PROGRAM")
    words = "folder, or a name in the Hugging Face cache, which AIPerf requires"
    parser.add_argument("--tokenizer", default="tokenizer", help=words)


def named_peers(
    parser: argparse.ArgumentParser, peers: Sequence[str], known: Collection[str]
) -> dict[str, str]:
    """Return the program of each --peer by name; exit with an error for an unknown name."""
    programs = dict(text.partition("=")[::2] for text in peers)
    if unknown := set(programs) - set(known):
        parser.error(f"--peer: {sorted(unknown)} unknown; allowed: {sorted(known)}")
    return programs


# ---- one run


def _tree(pid: int) -> list[int]:
    """Return a process and all its descendants.

    psutil would read every process of the machine, which takes milliseconds of the client's CPU.
    """
    tree = [pid]
    for parent in tree:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for listed in Path(f"/proc/{parent}/task").glob("*/children"):
                tree += map(int, listed.read_text().split())
    return tree


class _TreeSampler(threading.Thread):
    """A sampler of CPU seconds and resident memory of a process and its descendants."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._root = pid
        self._seconds: dict[int, float] = {}
        self.series: list[tuple[int, float]] = []
        self.peak_mb = 0.0
        self.ended = threading.Event()

    def run(self) -> None:
        """Sample until stopped; keep the CPU time of processes that ended."""
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
    """The result of one client at one event rate, or in one closed loop."""

    client: str
    events_per_s: float
    requests_per_s: float
    achieved: float
    error_p50_ms: float
    error_p99_ms: float
    cpu_s_per_1000: float
    peak_mb: float

    @property
    def sustained(self) -> bool:
        """Return whether the client kept the rate, with a TTFT error of at most ERROR_MS."""
        return self.achieved >= SUSTAINED_RATE and abs(self.error_p99_ms) <= ERROR_MS

    def cells(self) -> list[str]:
        """Return the row's cells as text."""
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
            "yes" if self.sustained else "no",
        ]


def measure(
    name: str,
    client: Client,
    program: str,
    events_per_s: float,
    places: int,
    options: argparse.Namespace,
) -> Row | str:
    """Run one client at one rate, or with `places` requests at once.

    Return its row, or why there is none.
    """
    client_cpu, server_cpu = two_cpus()
    tokens = options.tokens
    if places:
        # The event rate of a client that loses no time between two requests.
        events_per_s = places * tokens / ((FIRST_US + GAP_US * (tokens - 1)) / 1e6)
    rate_rps = events_per_s / tokens
    count = max(20, round(rate_rps * options.seconds))
    with tempfile.TemporaryDirectory(prefix="connector-tax-peer-") as text:
        folder = Path(text)
        prompts = folder / "prompts.jsonl"
        line = json.dumps({"text": PROMPT, "output_tokens_count": tokens, "prompt": PROMPT})
        prompts.write_text((line + "\n") * count)
        with EventServer(server_cpu) as server:
            load = {
                "url": f"http://127.0.0.1:{server.port}",
                "address": f"127.0.0.1:{server.port}", "rate": rate_rps, "places": places,
                "count": count, "tokens": tokens, "tokenizer": options.tokenizer,
                "folder": folder, "prompts": prompts,
            }  # fmt: skip
            if client.file:
                (folder / "config.yml").write_text(json.dumps(client.file(load)))
            process = subprocess.Popen(
                ["taskset", "-c", f"{client_cpu}", *client.words(program, load)],
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
            p50, p99 = client.ttft_ms(folder)
        except (OSError, KeyError, ValueError) as error:
            return f"no result (exit status {process.returncode}): {type(error).__name__}"
    # A client may first send a request to test the server.
    truth = sorted(server.responses)[-count:]
    if len(truth) < 2:
        return "the server saw no requests"
    arrivals = np.array([stamps[0] for stamps in truth])
    span_s = float(arrivals[-1] - arrivals[0]) / 1e9
    requests_per_s = min(len(truth) / count, 1.0) * (len(truth) - 1) / span_s
    true_ttft = [(stamps[1] - stamps[0]) / 1e6 for stamps in truth]
    busy_s = sampler.between(int(arrivals[0]), max(stamps[-1] for stamps in truth))
    return Row(
        name,
        events_per_s,
        requests_per_s,
        requests_per_s / rate_rps,
        p50 - float(np.percentile(true_ttft, 50)),
        p99 - float(np.percentile(true_ttft, 99)),
        busy_s / len(truth) * 1000,
        sampler.peak_mb,
    )


# ---- at each rate


def rates(options: argparse.Namespace, programs: Mapping[str, str]) -> None:
    """Print a row for each client at each rate."""
    table = Table(
        *("client", "events/s", "requests/s", "sent/plan", "TTFT p50 error ms", "p99 error ms"),
        *("CPU s / 1000 requests", "requests / CPU s", "peak MB", "sustained"),
    )
    notes = ["MLPerf endpoints (inference-endpoint): not on PyPI"]
    loads = [(float(text), 0) for text in options.rates.split(",")]
    if options.places:
        loads = [(0.0, int(text)) for text in options.places.split(",")]
    for name, client in CLIENTS.items():
        if name not in programs:
            notes.append(f"{name}: not installed here")
            continue
        highest = 0.0
        for events_per_s, places in loads:
            row = measure(name, client, programs[name], events_per_s, places, options)
            if isinstance(row, str):
                notes.append(f"{name} at {places or events_per_s:,.0f}: {row}")
                break
            table.add_row(*row.cells())
            if row.sustained:
                highest = row.events_per_s
            elif not places and events_per_s > 5 * max(highest, 1000):
                break
        if not options.places:
            notes.append(f"{name}: sustained {highest:,.0f} events/s")
        table.add_section()
    load = "closed loop" if options.places else "constant rate"
    console = Console(width=140, highlight=False)
    console.print(machine("uvloop"))
    console.print(
        f"one CPU for each client, one for the server; {load}, {options.tokens} events "
        f"{GAP_US / 1e3:g} ms apart, {options.seconds:g} s per row; a rate is sustained if "
        f"sent/plan is at least {SUSTAINED_RATE} and the TTFT p99 error at most {ERROR_MS:g} ms"
    )
    console.print(table, *notes, sep="\n")


def main() -> None:
    """Print the table."""
    parser = parser_of(__file__, __doc__)
    parser.add_argument("--rates", default="1000,5000,20000,40000,60000,80000", help="events/s")
    words = "run closed loops with these numbers of requests instead of rates"
    parser.add_argument("--places", help=words)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=4.0, help="length of each run")
    add_peers(parser)
    options = parser.parse_args()
    rates(options, {OWN: sys.executable, **named_peers(parser, options.peer, CLIENTS)})


if __name__ == "__main__":
    raise SystemExit(run_alone(main))
