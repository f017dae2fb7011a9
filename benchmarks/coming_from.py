"""Run other clients' command lines, and their equivalents for `loadgen`, on the same server.

    python -m benchmarks.coming_from --peer "vllm bench serve=PATH" --tokenizer FOLDER

Both lines of a pair run against the C event server, whose log gives the requests, the tokens of
each answer, and the most at once; the TTFT that the client prints is shown too. The command
rewrites the page docs/coming-from.md if every other client is given by a --peer; otherwise it
leaves the page as it is. AIPerf takes a tokenizer by its name in the Hugging Face cache
(`--aiperf-tokenizer`).
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks import machine, parser_of
from benchmarks.event_server import EventServer, two_cpus
from benchmarks.peers import CLIENTS, PROMPT, add_peers, named_peers, reported
from connector_tax.config import ROOT
from connector_tax.text import markdown_table

PAGE = ROOT / "docs/coming-from.md"
TIMEOUT_S = 180.0
VLLM, GUIDELLM, AIPERF = "vllm bench serve", "guidellm", "AIPerf"
# Common beginning of a client's lines; the run writes the prompt file.
COMMON = {
    VLLM: "--base-url {url} --model m --tokenizer {tokenizer} --dataset-name random"
    " --random-input-len 8 --random-output-len 16 --ignore-eos",
    GUIDELLM: "--backend kind=openai_http,target={url},model=m,request_format=/v1/completions"
    " --data kind=json_file,path=prompts.jsonl"
    " --tokenizer kind=hf_auto,model={tokenizer}",
    AIPERF: "--model m --url {url} --streaming --tokenizer {tokenizer} --isl 8 --osl 16"
    " --use-legacy-max-tokens --extra-inputs ignore_eos:true --ui none",
    "": "--url {url} --model m --prompt-tokens 8 --max-tokens 16 --ignore-eos",
}
# Options by which a client writes its report, and the reader of its TTFT p50 and p99 in ms.
PRINTED = {
    name: (CLIENTS[peer].report, CLIENTS[peer].ttft_ms)
    for name, peer in ((VLLM, VLLM), (GUIDELLM, GUIDELLM), (AIPERF, "aiperf"))
}
PRINTED[""] = ("--no-affinity --summary own.json", reported("own.json", "latency_ms", "TTFT"))
WORDS = "their prompts are counted in tokens, ours in words"
PROGRAM = {VLLM: "bench serve", GUIDELLM: "run", AIPERF: "profile"}
CHAT = "--url {url} --model m --prompt-words 8 --max-tokens 16 --ignore-eos --chat"


@dataclass(frozen=True)
class Pair:
    """Another client's command line and its equivalent for `loadgen`.

    Each sends `requests` requests, or any number if it is None.
    """

    client: str
    peer_line: str
    own_line: str
    requests: int | None = 40
    differs: str = ""

    def our_arguments(self, url: str) -> list[str]:
        """Return the arguments of `connector-tax loadgen`."""
        common = CHAT if "--chat" in self.own_line else COMMON[""]
        return shlex.split(f"{common.format(url=url)} {self.own_line.replace('--chat', '')}")

    def their_arguments(self, url: str, tokenizer: str) -> list[str]:
        """Return the arguments of the other client."""
        common = COMMON[self.client].format(url=url, tokenizer=tokenizer)
        return shlex.split(f"{PROGRAM[self.client]} {common} {self.peer_line}")


AT_40 = "--constraint kind=max_requests,count=40"
COMPLETIONS = "--endpoint-type completions --request-count 40"
PAIRS = (
    Pair(VLLM, "--num-prompts 40", "--rate inf --requests 40"),
    Pair(VLLM, "--num-prompts 40 --request-rate 20", "--requests 40 --rate 20 --arrivals poisson"),
    Pair(VLLM, "--num-prompts 40 --request-rate 20 --burstiness 1000000",
         "--requests 40 --rate 20 --arrivals fixed",
         differs="theirs is a gamma process with a huge shape, ours has exact gaps"),
    Pair(VLLM, "--num-prompts 40 --request-rate 20 --burstiness 0.5",
         "--requests 40 --rate 20 --arrivals gamma --gamma-shape 0.5",
         differs="vLLM stretches its gaps, so that the last request comes at count / rate"),
    Pair(VLLM, "--num-prompts 40 --max-concurrency 8", "--requests 40 --concurrency 8"),
    Pair(VLLM, "--num-prompts 40 --request-rate 20 --goodput ttft:200 tpot:20",
         "--requests 40 --rate 20 --arrivals poisson --goodput ttft:200 tpot:20",
         differs="our TTFT begins at the due time"),
    Pair(VLLM, "--backend openai-chat --endpoint /v1/chat/completions --num-prompts 40 "
         "--max-concurrency 8", "--chat --requests 40 --concurrency 8", differs=WORDS),
    Pair(GUIDELLM, "--profile kind=synchronous --constraint kind=max_requests,count=10",
         "--requests 10 --concurrency 1", 10),
    Pair(GUIDELLM, f"--profile kind=concurrent,streams=8 {AT_40}",
         "--requests 40 --concurrency 8"),
    Pair(GUIDELLM, f"--profile kind=throughput,max_concurrency=40 {AT_40}",
         "--requests 40 --rate inf"),
    Pair(GUIDELLM, f"--profile kind=constant,rate=20 {AT_40}",
         "--requests 40 --rate 20 --arrivals fixed"),
    Pair(GUIDELLM, f"--profile kind=poisson,rate=20 {AT_40}",
         "--requests 40 --rate 20 --arrivals poisson"),
    Pair(GUIDELLM, "--profile kind=constant,rate=20 --constraint kind=max_duration,seconds=2",
         "--duration 2 --rate 20 --arrivals fixed", None,
         "theirs cancels requests that still run at the end, ours waits up to --drain"),
    Pair(GUIDELLM, f"--profile kind=concurrent,streams=8 {AT_40} "
         "--constraint kind=max_errors,count=5", "--requests 40 --concurrency 8 --max-errors 5"),
    Pair(AIPERF, f"{COMPLETIONS} --concurrency 8", "--requests 40 --concurrency 8"),
    Pair(AIPERF, f"{COMPLETIONS} --request-rate 20 --arrival-pattern poisson",
         "--requests 40 --rate 20 --arrivals poisson"),
    Pair(AIPERF, f"{COMPLETIONS} --request-rate 20 --arrival-pattern constant",
         "--requests 40 --rate 20 --arrivals fixed"),
    Pair(AIPERF, f"{COMPLETIONS} --request-rate 20 --arrival-pattern gamma --arrival-smoothness 2",
         "--requests 40 --rate 20 --arrivals gamma --gamma-shape 2"),
    Pair(AIPERF, "--endpoint-type completions --benchmark-duration 2 --concurrency 8",
         "--duration 2 --concurrency 8", None,
         "requests that still run at the end: theirs has --benchmark-grace-period, ours --drain"),
    Pair(AIPERF, "--endpoint-type chat --request-count 40 --concurrency 8 "
         "--concurrency-ramp-duration 1", "--chat --requests 40 --concurrency 8 --rampup 1",
         differs=WORDS),
)  # fmt: skip


def did(arguments: list[str], client: str = "") -> str:
    """Run a client's command against a new server; return the table cell for the command.

    The cell states the requests in the server's log and the TTFT that the client printed, or why
    there are none.
    """
    write, ttft_ms = PRINTED[client]
    client_cpu, server_cpu = two_cpus()
    with tempfile.TemporaryDirectory(prefix="connector-tax-coming-") as folder:
        prompts = Path(folder, "prompts.jsonl")
        prompts.write_text((json.dumps({"prompt": PROMPT, "output_tokens_count": 16}) + "\n") * 100)
        with EventServer(server_cpu) as server:
            words = [*arguments, *write.format(folder=".").split()]
            command = [word.replace("PORT", f"{server.port}") for word in words]
            process = subprocess.Popen(
                ["taskset", "-c", f"{client_cpu}", *command],
                cwd=folder,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            try:
                output, _ = process.communicate(timeout=TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                return f"no end within {TIMEOUT_S:g} s"
        if process.returncode not in (0, 1):
            print(output[-2000:], file=sys.stderr)
            return f"exit status {process.returncode}"
        try:
            printed_ms, _ = ttft_ms(Path(folder))
        except FileNotFoundError:
            return f"{seen(sorted(server.responses))}, and wrote no report"
    responses = sorted(server.responses)
    true_ms = np.median([(stamps[1] - stamps[0]) / 1e6 for stamps in responses])
    return f"{seen(responses)}, {printed_ms:.1f} ({true_ms:.1f}) ms"


def seen(responses: list[list[int]]) -> str:
    """Return the number of requests, the tokens of each, and the most requests at once, as text."""
    if len(responses) < 2:
        return f"{len(responses)} requests"
    tokens = np.unique([len(stamps) - 1 for stamps in responses])
    edges = sorted([(t[0], 1) for t in responses] + [(t[-1], -1) for t in responses])
    most = int(np.cumsum([step for _, step in edges]).max())
    each = "/".join(f"{count}" for count in tokens)
    return f"{len(responses)} × {each}, {most} at once"


def page(results: list[tuple[str, str]]) -> str:
    """Return the page with the results of each pair."""
    lines = [
        "# Coming from another client",
        "",
        "Twenty command lines of `vllm bench serve`, guidellm and AIPerf, each with ours for the",
        "same work. `python -m benchmarks.coming_from` runs both and writes this page. A cell of",
        "the tables states requests × tokens and the most requests at once, from the server's log;",
        "the count includes a first request with which a client checks the server. The TTFT p50",
        "that the client prints follows; the number in brackets is the server's time from request",
        "to first token. [Other clients](decisions.md#peers) compares how well each keeps a rate.",
        "",
        f"Machine: `{machine()}`.",
        "",
        f"Our lines begin with `connector-tax loadgen {COMMON[''].format(url='URL')}`,",
        "with `--prompt-words` in place of `--prompt-tokens` for `--chat`.",
        "",
        "If you use one of their options, the error names ours (`loadgen/spellings.py:PEERS`).",
        "Ours also takes Mooncake traces ([`--trace`](loadgen.md#traces)), prompt files",
        "([`--prompts`](loadgen.md#prompts)) and several rates",
        "([`--sweep`](loadgen.md#several-rates)).",
    ]
    for client in (VLLM, GUIDELLM, AIPERF):
        begin = COMMON[client].format(url="URL", tokenizer="TOKENIZER")
        program = client.lower() if client != VLLM else "vllm"
        lines += [
            "",
            f"## {client}",
            "",
            f"Lines of {client} begin with `{program} {PROGRAM[client]} {begin}`.",
            "",
            *markdown_table(
                ("theirs", "ours", "work of theirs", "work of ours", "difference"),
                *(
                    (f"`{pair.peer_line}`", f"`{pair.own_line}`", *both, pair.differs)
                    for pair, both in zip(PAIRS, results, strict=True)
                    if pair.client == client
                ),
            ),
        ]
    return "\n".join(lines) + "\n"


def write_page(target: Path, results: list[tuple[str, str]], clients: Collection[str]) -> str:
    """Write the page if all of its clients were run; return a line on what was done."""
    missing = [client for client in PROGRAM if client not in clients]
    if missing:
        return f"{target} is left as it is: no --peer for {', '.join(missing)}"
    target.write_text(page(results))
    return f"{target} is written"


def main() -> int:
    """Run all pairs; write the page if every other client was run."""
    parser = parser_of(__file__, __doc__)
    add_peers(parser)
    parser.add_argument("--aiperf-tokenizer", default="gpt2", help="name of a tokenizer")
    options = parser.parse_args()
    programs = named_peers(parser, options.peer, PROGRAM)
    url = "http://127.0.0.1:PORT"
    results = []
    for pair in PAIRS:
        their_result = "not run"
        if pair.client in programs:
            name = options.aiperf_tokenizer if pair.client == AIPERF else options.tokenizer
            their_result = did(
                [programs[pair.client], *pair.their_arguments(url, name)], pair.client
            )
        command = [sys.executable, "-m", "connector_tax.loadgen", *pair.our_arguments(url)]
        our_result = did(command)
        results.append((their_result, our_result))
        print(f"{pair.client} {pair.peer_line}: {their_result} | {our_result}", flush=True)
    print(write_page(PAGE, results, programs))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
