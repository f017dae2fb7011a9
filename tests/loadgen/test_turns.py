"""Test that the next turn repeats an answer with more than text unchanged."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.loadgen.fault_server import HEAD, FaultServer, Step, chunked, event, usage
from tests.loadgen.running import command, write_sessions

CALLS = [
    {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
    {"id": "c2", "type": "function", "function": {"name": "now", "arguments": "{}"}},
]
# The same calls as a stream brings them: names first, arguments in parts, one call after the other.
PARTS: list[dict[str, Any]] = [
    {"tool_calls": [{"index": 0, "id": "c1", "type": "function", "function": {"name": "add"}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": '{"a":'}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": " 1}"}}]},
    {"tool_calls": [{"index": 1, **CALLS[1]}]},
]


def streamed(*deltas: dict[str, Any], finish: str = "stop") -> list[Step]:
    """Return a chat stream of these deltas."""
    first = {"role": "assistant", "content": ""}
    choices: list[dict[str, Any]] = [{"delta": delta} for delta in (first, *deltas)]
    choices.append({"delta": {}, "finish_reason": finish})
    events = [event(json.dumps({"choices": [choice]})) for choice in choices]
    return [HEAD + chunked(*events, event(usage(4, len(deltas))), event("[DONE]"))]


def whole(message: dict[str, Any], finish: str = "stop") -> list[Step]:
    """Return a whole chat response."""
    choices = [{"index": 0, "message": message, "finish_reason": finish}]
    counts = json.loads(usage(4, 3))["usage"]
    body = json.dumps({"choices": choices, "usage": counts}).encode()
    return [b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)]


TOOLS = {"role": "assistant", "content": None, "tool_calls": CALLS}
CALLED = {
    "role": "assistant",
    "content": None,
    "function_call": {"name": "f", "arguments": "{}"},
}
THOUGHT = {"role": "assistant", "content": None, "reasoning_content": "Hm. Yes."}


# An answer, and the turn that it becomes.
STREAMED: dict[str, tuple[list[Step], dict[str, Any]]] = {
    "calls": (streamed(*PARTS, finish="tool_calls"), TOOLS),
    "text and calls": (streamed({"content": "Look: "}, *PARTS), {**TOOLS, "content": "Look: "}),
    "thought": (
        streamed({"reasoning_content": "Hm."}, {"reasoning_content": " Yes."}), THOUGHT),
    "old call": (
        streamed({"function_call": {"name": "f"}}, {"function_call": {"arguments": "{}"}}), CALLED),
    "refusal": (
        streamed({"refusal": "N"}, {"refusal": "o"}),
        {"role": "assistant", "content": None, "refusal": "No"}),
    "thought and text": (
        streamed({"reasoning": "Hm."}, {"content": "Yes."}),
        {"role": "assistant", "content": "Yes."}),
}  # fmt: skip
WHOLE = {"calls": (whole(TOOLS, "tool_calls"), TOOLS), "thought": (whole(THOUGHT), THOUGHT)}


@pytest.mark.parametrize(("answers", "options"), [(STREAMED, ""), (WHOLE, " --no-stream")])
def test_child_turn_repeats_the_parents_answer_unchanged(
    answers: dict[str, tuple[list[Step], dict[str, Any]]], options: str, tmp_path: Path
) -> None:
    sessions = [
        {
            "id": name,
            "nodes": [
                {"id": "a", "prompt": name, "max_tokens": 9},
                {"id": "b", "prompt": "two", "max_tokens": 9, "parents": [{"node": "a"}]},
            ],
        }
        for name in answers
    ]
    path = write_sessions(tmp_path, *sessions)
    scripts = {name: script for name, (script, _) in answers.items()}
    with FaultServer(scripts, lambda body: body["messages"][0]["content"]) as server:
        load = f"--chat --concurrency 1 --session-file {path}{options}"
        _, summary, _ = command(server.port, tmp_path, load)
        turns = [body["messages"] for body in server.bodies if len(body["messages"]) > 1]
    assert summary["ok"] == 2 * len(answers)
    assert turns == [
        [{"role": "user", "content": name}, inherited, {"role": "user", "content": "two"}]
        for name, (_, inherited) in answers.items()
    ]
