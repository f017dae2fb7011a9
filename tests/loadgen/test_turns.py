"""Test that answers with more than text are inherited unchanged."""

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


@pytest.mark.parametrize(
    ("answer", "options", "inherited"),
    [
        (streamed(*PARTS, finish="tool_calls"), "", TOOLS),
        (streamed({"content": "Look: "}, *PARTS), "", {**TOOLS, "content": "Look: "}),
        (streamed({"reasoning_content": "Hm."}, {"reasoning_content": " Yes."}), "", THOUGHT),
        (
            streamed({"function_call": {"name": "f"}}, {"function_call": {"arguments": "{}"}}),
            "",
            CALLED,
        ),
        (
            streamed({"refusal": "N"}, {"refusal": "o"}),
            "",
            {"role": "assistant", "content": None, "refusal": "No"},
        ),
        (streamed({"reasoning": "Hm."}, {"content": "Yes."}), "",
         {"role": "assistant", "content": "Yes."}),
        (whole(TOOLS, "tool_calls"), " --no-stream", TOOLS),
        (whole(THOUGHT), " --no-stream", THOUGHT),
    ],
)  # fmt: skip
def test_child_turn_repeats_the_parents_answer_unchanged(
    answer: list[Step], options: str, inherited: dict[str, Any], tmp_path: Path
) -> None:
    nodes = [
        {"id": "a", "prompt": "one", "max_tokens": 9},
        {"id": "b", "prompt": "two", "max_tokens": 9, "parents": [{"node": "a"}]},
    ]
    path = write_sessions(tmp_path, {"id": "s", "nodes": nodes})
    with FaultServer({"x": answer}, lambda _: "x") as server:
        load = f"--chat --concurrency 1 --session-file {path}{options}"
        _, summary, _ = command(server.port, tmp_path, load)
        bodies = server.bodies
    assert summary["ok"] == 2
    assert bodies[1]["messages"] == [
        {"role": "user", "content": "one"},
        inherited,
        {"role": "user", "content": "two"},
    ]
