"""Sessions: graphs of requests, where a child waits for its parents and may inherit their history.

A session file has one JSON object per line:

    {"id": "s1", "nodes": [
      {"id": "a", "prompt": "Hello", "max_tokens": 16},
      {"id": "b", "prompt": "And then?", "max_tokens": 16, "wait_after_ready_s": 0.5,
       "parents": [{"node": "a", "history": true}]}]}

A session may have a `start_s`, as in a trace; then all have one. `prompt` is text or a list of
token ids. A node becomes ready when every parent has ended, and is
due `wait_after_ready_s` later. Its history is every turn (prompt and output) that its history
parents know, their own included, each turn once, in the order of the parents.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Protocol

import msgspec
from msgspec import Meta

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
    """A graph of requests; parents stand before their children in `nodes`.

    `start_s`: when it starts, after the beginning of the run; None: as the traffic says.
    """

    id: str
    nodes: Annotated[tuple[Node, ...], Meta(min_length=1)]
    start_s: Annotated[float, Meta(ge=0)] | None = None

    def __post_init__(self) -> None:
        for name in (self.id, *(node.id for node in self.nodes)):
            # Both stand in the X-Request-Id header.
            if not (name.isascii() and name.isprintable()):
                raise ValueError(f"id {name!r}: allowed are printable ASCII characters")
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


def needed_capture(sessions: Iterable[Session]) -> Capture:
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


class Sessions(Protocol):
    """Sessions in the order of their starts, each made when it is asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Session: ...

    def __iter__(self) -> Iterator[Session]: ...


@dataclass(frozen=True, slots=True)
class Singles:
    """`count` sessions `r0`, `r1`, ... of one request each."""

    count: int
    node: Node

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Session:
        return Session(f"r{index}", (self.node,))

    def __iter__(self) -> Iterator[Session]:
        return map(self.__getitem__, range(self.count))
