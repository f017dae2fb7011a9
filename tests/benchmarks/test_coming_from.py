"""Test that the lines of docs/coming-from.md send the stated requests."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.coming_from import PAGE, PAIRS, Pair, write_page
from connector_tax.loadgen.__main__ import main
from tests.loadgen.fault_server import HEAD, chunked, event, serve, token, usage

TOKENS = [event(token())] * 15
ANSWER = HEAD + chunked(
    *TOKENS, event(token(finish="length")), event(usage(8, 16)), event("[DONE]")
)
OURS = {pair.own_line: pair for pair in PAIRS}


@pytest.mark.parametrize("pair", OURS.values(), ids=OURS)
def test_equivalent_command_line_sends_the_stated_requests(pair: Pair, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with serve(ANSWER) as server:
        arguments = pair.our_arguments(f"http://127.0.0.1:{server.port}")
        assert main([*arguments, "--no-affinity", "--output", str(output)]) in (0, 1)
        bodies = server.bodies
    records: list[dict[str, Any]] = list(map(json.loads, output.open()))
    assert {record["status"] for record in records} == {"ok"}
    assert {body["max_tokens"] for body in bodies} == {16}
    assert all(("messages" in body) == ("--chat" in pair.own_line) for body in bodies)
    assert len(bodies) == len(records)
    assert pair.requests is None or len(records) == pair.requests


def test_page_lists_every_pair_of_commands() -> None:
    text = PAGE.read_text()
    assert len(PAIRS) == 20
    for pair in PAIRS:
        assert f"| `{pair.peer_line}` | `{pair.own_line}` |" in text


def test_page_is_left_as_it_is_unless_every_client_was_run(tmp_path: Path) -> None:
    target = tmp_path / "coming-from.md"
    target.write_text("measured with every client\n")
    results = [("not run", "40 × 16")] * len(PAIRS)
    for clients, missing in (
        ([], "vllm bench serve, guidellm, AIPerf"),
        (["guidellm", "AIPerf"], "vllm bench serve"),
    ):
        message = write_page(target, results, clients)
        assert message == f"{target} is left as it is: no --peer for {missing}"
        assert target.read_text() == "measured with every client\n"
    every_client = {pair.client for pair in PAIRS}
    assert write_page(target, results, every_client) == f"{target} is written"
    assert "40 × 16" in target.read_text()
