"""Sessions: graphs of requests, where a child waits for its parents and may inherit their history.

A session file has one JSON object per line:

    {"id": "s1", "nodes": [
      {"id": "a", "prompt": "Hello", "max_tokens": 16},
      {"id": "b", "prompt": "And then?", "max_tokens": 16, "wait_after_ready_s": 0.5,
       "parents": [{"node": "a", "history": true}]}]}

A session may have a `start_s`, as in a trace; then every session must have it. `prompt` is text or
a list of token ids. A node becomes ready when every parent has ended, and is due
`wait_after_ready_s` later. Its history holds the turns (prompt and output) of its history parents
and of their histories, each turn once, in the order of the parents.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from connector_tax.loadgen.messages import Capture, Output
from connector_tax.seeds import named_generator

# Three years, of which ns are exact integers.
LONGEST_S = 1e8
TokenIds = list[Annotated[int, Meta(ge=0)]]
Messages = list[dict[str, Any]]
Prompt = str | list[int] | Messages


class Parent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An edge to a node that must end first; with `history`, its turns are inherited."""

    node: str
    history: bool = True


class Node(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    prompt: str | TokenIds
    max_tokens: Annotated[int, Meta(ge=1)]
    wait_after_ready_s: Annotated[float, Meta(ge=0, le=LONGEST_S)] = 0.0
    parents: tuple[Parent, ...] = ()


class Session(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A graph of requests; `nodes` lists parents before their children.

    `start_s`: its start in s after the beginning of the run; None if the traffic decides it.
    """

    id: str
    nodes: Annotated[tuple[Node, ...], Meta(min_length=1)]
    start_s: Annotated[float, Meta(ge=0, le=LONGEST_S)] | None = None

    def __post_init__(self) -> None:
        for name in (self.id, *(node.id for node in self.nodes)):
            # Both stand in the X-Request-Id header.
            if not (name.isascii() and name.isprintable()):
                raise ValueError(f"id {name!r}: allowed are printable ASCII characters")
        seen: dict[str, Node] = {}
        for node in self.nodes:
            for parent in node.parents:
                if parent.node not in seen:
                    raise ValueError(f"node {node.id!r}: list parent {parent.node!r} before it")
                inherited = seen[parent.node]
                if parent.history and isinstance(inherited.prompt, str) != isinstance(
                    node.prompt, str
                ):
                    raise ValueError(f"node {node.id!r}: inherits both text and token ids")
            if len({parent.node for parent in node.parents}) != len(node.parents):
                raise ValueError(f"node {node.id!r}: names a parent twice")
            if node.id in seen:
                raise ValueError(f"node {node.id!r} is defined twice")
            seen[node.id] = node


class Turn(msgspec.Struct, frozen=True):
    """A finished node's part of the history that its descendants inherit.

    `output` is a message where an answer is more than its text (`loadgen/turns.py:output_of`).
    """

    node: str
    prompt: str | TokenIds
    output: Output


History = tuple[Turn, ...]


def read_sessions(path: Path) -> list[Session]:
    """Read a session file.

    Raises:
        ValueError: a line is not a session; names file, line, key and the value found.
    """
    decoder = msgspec.json.Decoder(Session)
    sessions: dict[str, Session] = {}
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                raise ValueError(f"{path}:{number}: blank line; allowed: one session per line")
            try:
                session = decoder.decode(line)
            except msgspec.DecodeError as error:
                raise ValueError(f"{path}:{number}: {error}") from None
            if session.id in sessions:
                raise ValueError(f"{path}:{number}: session id {session.id!r} is used twice")
            sessions[session.id] = session
    if not sessions:
        raise ValueError(f"{path}: holds no session")
    return [*sessions.values()]


def needed_capture(sessions: "Sessions") -> Capture:
    """Return which part of an answer must be kept for the children that inherit it.

    Raises:
        ValueError: some sessions inherit text and others token ids.
    """
    if isinstance(sessions, Singles):
        return "counts"
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


@dataclass(frozen=True, slots=True)
class Singles:
    """Sessions of one request each: `count` of them, named `r0`, `r1` and so on.

    `lengths`: the output tokens of each in turn, in place of the node's `max_tokens`.
    """

    count: int
    node: Node
    lengths: Sequence[int] | None = None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Session:
        name, node = self.single(index)
        return Session(name, (node,))

    def single(self, index: int) -> tuple[str, Node]:
        """Return the name and the only node of a session."""
        node = self.node
        if self.lengths is not None:
            node = msgspec.structs.replace(node, max_tokens=self.lengths[index % len(self.lengths)])
        return f"r{index}", node


Sessions = Singles | Sequence[Session]
"""Sessions in the order of their starts."""


def node_of(sessions: Sessions, session: int, node: int) -> tuple[str, Node]:
    """Return the name of a session, and a node of it."""
    if isinstance(sessions, Singles):
        return sessions.single(session)
    graph = sessions[session]
    return graph.id, graph.nodes[node]


AHEAD = 256
"""Number of bodies made ahead; for 16,000-token prompts they take 25 MB."""


class PlannedRequest(msgspec.Struct, frozen=True):
    """A request before it is sent: `body` is the complete JSON of the POST.

    The response's usage must equal the token counts, or the request fails with `wrong_length`; None
    leaves a count unchecked. `request_id` is sent as X-Request-Id, so that the server's log of the
    request can be matched to the record.
    """

    request_id: str
    body: bytes
    prompt_tokens: int | None
    completion_tokens: int | None

    def __post_init__(self) -> None:
        if not (self.request_id.isascii() and self.request_id.isprintable()):
            raise ValueError(f"request_id {self.request_id!r} is not printable ASCII")


RequestSource = Iterable[PlannedRequest]
"""Requests in sending order, each made when the iteration reaches it."""
# (session index, node index, inherited history) -> request.
Build = Callable[[int, int, History], PlannedRequest]


def random_requests(
    name: str,
    count: int,
    prompt: Callable[[], str | list[int]],
    chat: bool,
    before: dict[str, Any],
    after: dict[str, Any],
    prompt_tokens: int | None,
    completion_tokens: int | None,
) -> Iterator[PlannedRequest]:
    """Yield `count` requests with prompts of one length, named `<name>/0`, `<name>/1` and so on.

    Args:
        prompt: makes the next prompt, which stands in the body between `before` and `after`.
        chat: send each prompt as a user's message.
        prompt_tokens: the length of each prompt, if known.
        completion_tokens: the length required of each answer; None if any length is allowed.
    """
    encode = msgspec.json.Encoder().encode
    for k in range(count):
        drawn = prompt()
        prompt_field: dict[str, Any] = {"prompt": drawn}
        if chat:
            prompt_field = {"messages": [{"role": "user", "content": drawn}]}
        body = encode({**before, **prompt_field, **after})
        yield PlannedRequest(f"{name}/{k}", body, prompt_tokens, completion_tokens)


_BLOCK = 4096
"""Number of ids drawn in one call, since a call costs more than a few ids."""


def _rows(seed: str, count: int, first: int, end: int) -> Iterator[list[int]]:
    """Yield lists of `count` random numbers in [first, end) from the generator named `seed`."""
    draw = named_generator(seed).integers
    shape = max(1, _BLOCK // count), count
    while True:
        yield from draw(first, end, size=shape).tolist()


def random_tokens(seed: str, count: int, first_id: int, end_id: int) -> Callable[[], list[int]]:
    """Return a function that makes prompts of `count` ids in [first_id, end_id), from random stream
    `seed`.
    """
    return _rows(seed, count, first_id, end_id).__next__


WORDS = (
    *("the", "of", "and", "to", "in", "is", "you", "that", "it", "he", "was", "for", "on", "are"),
    *("as", "with", "his", "they", "at", "be", "this", "have", "from", "or", "one", "had", "by"),
    *("word", "but", "not", "what", "all", "were", "we", "when", "your", "can", "said", "there"),
)


def random_words(seed: str, count: int) -> Callable[[], str]:
    """Return a function that makes prompts of `count` common words, from random stream `seed`."""
    rows = _rows(seed, count, 0, len(WORDS))
    return lambda: " ".join([WORDS[k] for k in next(rows)])


class LookAhead:
    """A buffer of requests: first requests of sessions are made ahead, all others when they are
    due.

    A request that inherits from others cannot be made before they have ended.

    Args:
        most: how many are made ahead at most.
    """

    def __init__(self, sessions: Sessions, build: Build, most: int = AHEAD) -> None:
        self._build = build
        self._most = most
        self._sessions = iter(range(len(sessions)))
        self._made: dict[int, PlannedRequest] = {}

    def make_one(self) -> bool:
        """Make the next request; return False if enough are ready, or all are made."""
        if len(self._made) >= self._most:
            return False
        session = next(self._sessions, None)
        if session is not None:
            self._made[session] = self._build(session, 0, ())
        return session is not None

    def take(self, session: int, node: int, history: History) -> PlannedRequest:
        """Return the request of a node, whether it was made ahead or is made now."""
        if node != 0:
            return self._build(session, node, history)
        while session not in self._made:
            number = next(self._sessions)
            self._made[number] = self._build(number, 0, ())
        return self._made.pop(session)


def session_bodies(
    sessions: Sessions,
    name: str,
    common: dict[str, Any],
    chat: bool,
    extra: dict[str, Any],
    prompt_of: Callable[[int], Prompt] | None = None,
) -> Build:
    """Return a function that makes the requests `<name>/<session>/<node>` with inherited history.

    Completion tokens are checked only if `ignore_eos` fixes them.

    Args:
        common: the keys that begin every body.
        extra: keys merged into every body last (temperature, ...); None removes a key.
        prompt_of: makes the prompt of each session's request in place of its node's; messages are
            sent as they are.
    """

    encode = msgspec.json.Encoder().encode

    @cache
    def template(max_tokens: int) -> dict[str, Any]:
        merged = {**common, "max_tokens": max_tokens, **extra}
        return {key: value for key, value in merged.items() if value is not None}

    def build(session: int, node: int, history: History) -> PlannedRequest:
        graph_name, planned = node_of(sessions, session, node)
        prompt: Prompt = planned.prompt if prompt_of is None else prompt_of(session)
        body = template(planned.max_tokens).copy()
        prompt_tokens: int | None = None
        if chat and not isinstance(prompt, str):
            body["messages"] = prompt
        elif chat:
            body["messages"] = [
                *itertools.chain(*map(_messages, history)),
                _message("user", prompt),
            ]
        else:
            body["prompt"] = prompt = _joined(prompt, history)
            prompt_tokens = None if isinstance(prompt, str) else len(prompt)
        wanted = body.get("max_completion_tokens", body.get("max_tokens"))
        return PlannedRequest(
            request_id=f"{name}/{graph_name}/{planned.id}",
            body=encode(body),
            prompt_tokens=prompt_tokens,
            completion_tokens=wanted if body.get("ignore_eos") else None,
        )

    return build


def _messages(turn: Turn) -> Messages:
    """Return the messages of a turn: the user's message, and the assistant's message unchanged."""
    output = turn.output
    answer = output if isinstance(output, dict) else _message("assistant", output)
    return [_message("user", turn.prompt), answer]


def _message(role: str, content: Prompt) -> dict[str, Any]:
    return {"role": role, "content": content}


def _joined(prompt: Prompt, history: History) -> Prompt:
    if not history:
        return prompt
    pieces = [piece for turn in history for piece in (turn.prompt, turn.output)]
    if isinstance(prompt, str):
        return "".join([*map(str, pieces), prompt])
    return [token for piece in [*pieces, prompt] for token in piece if isinstance(token, int)]
