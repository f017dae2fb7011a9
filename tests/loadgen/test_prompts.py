"""Test prompt files: each prompt is sent once, unchanged, and the run ends with them."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.loadgen.fault_server import FaultServer, good_answer
from tests.loadgen.running import command

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]


def write(folder: Path, *lines: dict[str, Any]) -> str:
    """Write a prompt file; return its path."""
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def run(
    folder: Path, options: str, *lines: dict[str, Any]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the summary of a run and the bodies that the server got."""
    with FaultServer({"x": [good_answer()]}, lambda _: "x") as server:
        options = f"--prompts {write(folder, *lines)} {options}"
        _, summary, _ = command(server.port, folder, options)
        return summary, server.bodies


@pytest.mark.parametrize("load", ["--concurrency 1", "--rate 50 --arrivals fixed", "--rate inf"])
def test_each_prompt_is_sent_once_and_ends_the_run(load: str, tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [{"prompt": f"p{k}", "max_tokens": k + 1} for k in range(5)]
    summary, bodies = run(tmp_path, f"{load} --max-tokens 9", *lines, {"prompt": "last"})
    sent = sorted((body["prompt"], body["max_tokens"]) for body in bodies)
    assert sent == sorted([*((f"p{k}", k + 1) for k in range(5)), ("last", 9)])
    assert "all 6 prompts were used, which ended the run" in summary["notes"]


def test_repeat_restarts_the_prompts(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"prompt": "a", "max_tokens": 1},
        {"prompt": "b", "max_tokens": 2},
    ]
    summary, bodies = run(tmp_path, "--concurrency 1 --requests 5 --repeat", *lines)
    assert [(b["prompt"], b["max_tokens"]) for b in bodies] == [*[("a", 1), ("b", 2)] * 2, ("a", 1)]
    assert summary["requests"] == 5
    assert "5 requests from 2 prompts, repeated in turn" in summary["notes"]


def test_run_that_ends_early_reports_the_number_of_prompts_used(tmp_path: Path) -> None:
    lines = [{"prompt": f"p{k}"} for k in range(50)]
    summary, bodies = run(tmp_path, "--rate 10 --arrivals fixed --duration 0.5", *lines)
    assert len(bodies) == 5
    assert "5 of 50 prompts were used before the run ended" in summary["notes"]


def test_messages_of_a_prompt_file_are_sent_unchanged(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [{"messages": CHAT}, {"prompt": "plain"}]
    _, bodies = run(tmp_path, "--chat --concurrency 1", *lines)
    assert [b["messages"] for b in bodies] == [CHAT, [{"role": "user", "content": "plain"}]]


@pytest.mark.parametrize(
    ("line", "options", "named"),
    [
        ({}, "", ":2: neither prompt nor messages given"),
        ({"prompt": "x", "messages": CHAT}, "--chat", ":2: both"),
        ({"messages": CHAT}, "", ":2: messages given for a completions endpoint; add --chat"),
        ({"messages": [{"content": "x"}]}, "--chat", ":2: message without a role"),
        ({"messages": []}, "--chat", ":2: Expected `array` of length >= 1"),
        ({"prompt": [1, 2]}, "--chat", ":2: token ids given"),
        ({"prompt": "x", "max_tokens": 0}, "", ":2: Expected `int` >= 1 - at `$.max_tokens`"),
        ({"prompt": "x", "temperature": 1}, "", "`temperature`"),
        ({"prompt": "x"}, "--requests 3", "--requests: found 3; allowed: up to 2"),
    ],
)
def test_bad_prompt_is_refused_before_any_request(
    line: dict[str, Any],
    options: str,
    named: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write(tmp_path, {"prompt": "good"}, line)
    with pytest.raises(SystemExit) as ended:
        command(1, tmp_path, f"--prompts {path} --concurrency 1 {options}")
    assert ended.value.code == 2
    assert named in capsys.readouterr().err
