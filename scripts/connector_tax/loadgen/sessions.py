"""Sessions: graphs of requests, where a child waits for its parents and may inherit their history.

A session file has one JSON object per line:

    {"id": "s1", "nodes": [
      {"id": "a", "prompt": "Hello", "max_tokens": 16},
      {"id": "b", "prompt": "And then?", "max_tokens": 16, "wait_after_ready_s": 0.5,
       "parents": [{"node": "a", "history": true}]}]}

`prompt` is text or a list of token ids. A node becomes ready when every parent has ended, and is
due `wait_after_ready_s` later. Its history is every turn (prompt and output) that its history
parents know, their own included, each turn once, in the order of the parents.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from connector_tax.loadgen.cell import PlannedRequest

TokenIds = list[Annotated[int, Meta(ge=0)]]
Capture = Literal["counts", "text", "token_ids"]


class Parent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An edge to a node that must end first; `history`: its turns are inherited."""

    node: str
    history: bool = True


class Node(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request of a session."""

    id: str
    prompt: str | TokenIds
    max_tokens: Annotated[int, Meta(ge=1)]
    wait_after_ready_s: Annotated[float, Meta(ge=0)] = 0.0
    parents: tuple[Parent, ...] = ()


class Session(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A graph of requests; parents stand before their children in `nodes`."""

    id: str
    nodes: Annotated[tuple[Node, ...], Meta(min_length=1)]

    def __post_init__(self) -> None:
        seen: dict[str, Node] = {}
        for node in self.nodes:
            for parent in node.parents:
                if parent.node not in seen:
                    raise ValueError(f"node {node.id!r}: parent {parent.node!r} must stand before")
                inherited = seen[parent.node]
                if parent.history and isinstance(inherited.prompt, str) != isinstance(
                    node.prompt, str
                ):
                    raise ValueError(f"node {node.id!r}: inherits text and token ids mixed")
            if len({parent.node for parent in node.parents}) != len(node.parents):
                raise ValueError(f"node {node.id!r}: names a parent twice")
            if node.id in seen:
                raise ValueError(f"node {node.id!r} is defined twice")
            seen[node.id] = node


class Turn(msgspec.Struct, frozen=True):
    """What a finished node adds to the history of its descendants."""

    node: str
    prompt: str | TokenIds
    output: str | TokenIds


History = tuple[Turn, ...]


def merge_histories(histories: Sequence[History]) -> History:
    """Join the histories of several parents: each turn once, first come first."""
    return tuple({turn.node: turn for history in histories for turn in history}.values())


def read_sessions(path: Path) -> list[Session]:
    """Read a session file.

    Raises:
        ValueError: a line is no session; names file, line, key and what was found.
    """
    decoder = msgspec.json.Decoder(Session)
    sessions: list[Session] = []
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            try:
                sessions.append(decoder.decode(line))
            except msgspec.DecodeError as error:
                raise ValueError(f"{path}:{number}: {error}") from None
    if not sessions:
        raise ValueError(f"{path}: holds no session")
    ids = [session.id for session in sessions]
    if len(set(ids)) != len(ids):
        twice = next(name for name in ids if ids.count(name) > 1)
        raise ValueError(f"{path}: session id {twice!r} is used twice")
    return sessions


def needed_capture(sessions: Sequence[Session]) -> Capture:
    """Return what must be kept of the outputs so that children can inherit them.

    Raises:
        ValueError: some sessions inherit text and others token ids.
    """
    kinds = {
        isinstance(node.prompt, str)
        for session in sessions
        for node in session.nodes
        if any(parent.history for parent in node.parents)
    }
    if len(kinds) == 2:
        raise ValueError("some sessions inherit text and some token ids; run them separately")
    if not kinds:
        return "counts"
    return "text" if kinds.pop() else "token_ids"


class RequestBuilder:
    """Turns a node with its history into a request body."""

    def __init__(
        self, model: str, chat: bool, stream: bool, capture: Capture, extra: dict[str, Any]
    ) -> None:
        """`extra` is merged into every body last (temperature, ignore_eos, ...)."""
        self._chat = chat
        self._common: dict[str, Any] = {"model": model, "stream": stream}
        if stream:
            self._common["stream_options"] = {"include_usage": True}
        if capture == "token_ids":
            self._common["return_token_ids"] = True
        self._extra = extra

    def build(self, session: Session, node: Node, history: History) -> PlannedRequest:
        """Return the request; completion tokens are checked only if `ignore_eos` fixes them.

        Raises:
            ValueError: token ids for a chat endpoint.
        """
        body = {**self._common, "max_tokens": node.max_tokens, **self._extra}
        prompt_tokens: int | None = None
        if self._chat:
            body["messages"] = _messages(node, history)
        else:
            prompt = _joined(node, history)
            body["prompt"] = prompt
            prompt_tokens = None if isinstance(prompt, str) else len(prompt)
        fixed = bool(body.get("ignore_eos"))
        return PlannedRequest(
            request_id=f"{session.id}/{node.id}",
            body=json.dumps(body, separators=(",", ":")).encode(),
            prompt_tokens=prompt_tokens,
            completion_tokens=node.max_tokens if fixed else None,
        )


def _messages(node: Node, history: History) -> list[dict[str, str]]:
    messages: list[dict[str, str]] = []
    for turn in history:
        messages.append({"role": "user", "content": _text(turn.prompt)})
        messages.append({"role": "assistant", "content": _text(turn.output)})
    return [*messages, {"role": "user", "content": _text(node.prompt)}]


def _text(prompt: str | TokenIds) -> str:
    if not isinstance(prompt, str):
        raise ValueError("a chat endpoint takes text, not token ids")
    return prompt


def _joined(node: Node, history: History) -> str | TokenIds:
    pieces = [piece for turn in history for piece in (turn.prompt, turn.output)]
    if isinstance(node.prompt, str):
        return "".join([*map(str, pieces), node.prompt])
    return [token for piece in [*pieces, node.prompt] for token in piece if isinstance(token, int)]
