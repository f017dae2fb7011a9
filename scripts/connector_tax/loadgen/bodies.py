"""Request bodies: random prompts of one length, and bodies made ahead within bounded memory."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from connector_tax.loadgen.sessions import History, Node, Sessions, TokenIds
from connector_tax.seeds import named_generator

AHEAD = 256
"""Bodies made ahead: 25 MB of 16,000-token prompts."""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request before it is sent: `body` is the complete JSON of the POST.

    The response's usage must equal the token counts, else the request fails with `wrong_length`;
    None leaves a count unchecked. `request_id` is sent as X-Request-Id, so that a server's own log
    of the request can be joined to the record.
    """

    request_id: str
    body: bytes
    prompt_tokens: int | None
    completion_tokens: int | None

    def __post_init__(self) -> None:
        if not (self.request_id.isascii() and self.request_id.isprintable()):
            raise ValueError(f"request_id {self.request_id!r} is not printable ASCII")


class RequestSource(Protocol):
    """Requests to send in order, each made when the iteration comes to it."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[PlannedRequest]: ...


# Session, node (both by index) and what the node inherits -> its request.
Build = Callable[[int, int, History], PlannedRequest]


@dataclass(frozen=True, slots=True)
class RandomPrompts:
    """`count` requests with prompts of one length; every iteration makes the same.

    The prompt stands in the body between `before` and `after`. Request k has the id
    `<name>/<k>` and is asked to bring `completion_tokens` (None: any number).

    Attributes:
        prompts: begins the series of prompts anew.
        chat: the prompt is a user's message.
        prompt_tokens: of each prompt, where they are known.
    """

    name: str
    count: int
    prompts: Callable[[], Callable[[], str | list[int]]]
    chat: bool
    before: dict[str, Any]
    after: dict[str, Any]
    prompt_tokens: int | None
    completion_tokens: int | None

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[PlannedRequest]:
        prompt = self.prompts()
        encode = msgspec.json.Encoder().encode
        for k in range(self.count):
            drawn = prompt()
            asked: dict[str, Any] = (
                {"messages": [{"role": "user", "content": drawn}]}
                if self.chat
                else {"prompt": drawn}
            )
            yield PlannedRequest(
                f"{self.name}/{k}",
                encode({**self.before, **asked, **self.after}),
                self.prompt_tokens,
                self.completion_tokens,
            )


class RandomTokens:
    """Prompts of `count` token ids from [first_id, end_id), by the random stream `seed`."""

    def __init__(self, seed: str, count: int, first_id: int, end_id: int) -> None:
        self._draw = named_generator(seed).integers
        self._range = (first_id, end_id)
        self._count = count

    def __call__(self) -> list[int]:
        """The next prompt."""
        ids: list[int] = self._draw(*self._range, size=self._count).tolist()
        return ids


WORDS = (
    *("the", "of", "and", "to", "in", "is", "you", "that", "it", "he", "was", "for", "on", "are"),
    *("as", "with", "his", "they", "at", "be", "this", "have", "from", "or", "one", "had", "by"),
    *("word", "but", "not", "what", "all", "were", "we", "when", "your", "can", "said", "there"),
)


class RandomWords:
    """Prompts of `count` common words, by the random stream of the name `seed`."""

    def __init__(self, seed: str, count: int) -> None:
        self._draw = named_generator(seed).integers
        self._count = count

    def __call__(self) -> str:
        """The next prompt."""
        return " ".join([WORDS[k] for k in self._draw(0, len(WORDS), size=self._count)])


class LookAhead:
    """Makes the first request of sessions ahead, AHEAD at most; the others when they are due.

    A request that inherits from others cannot be made before they have ended.
    """

    def __init__(self, sessions: Sessions, build: Build) -> None:
        self._build = build
        self._sessions = iter(range(len(sessions)))
        self._made: dict[int, PlannedRequest] = {}

    def make_one(self) -> bool:
        """Make the next; False if enough are there, or all are made."""
        if len(self._made) >= AHEAD:
            return False
        session = next(self._sessions, None)
        if session is not None:
            self._made[session] = self._build(session, 0, ())
        return session is not None

    def take(self, session: int, node: int, history: History) -> PlannedRequest:
        """The request, made ahead or now."""
        if node != 0:
            return self._build(session, node, history)
        while session not in self._made:
            number = next(self._sessions)
            self._made[number] = self._build(number, 0, ())
        return self._made.pop(session)


class SessionBodies:
    """Makes the requests of sessions, each from its node and the history it inherits."""

    def __init__(
        self,
        sessions: Sessions,
        name: str,
        common: dict[str, Any],
        chat: bool,
        extra: dict[str, Any],
        fresh_prompt: Callable[[], str | list[int]] | None = None,
    ) -> None:
        """`common` begins every body and `extra` is merged into it last (temperature, ...).

        Request ids are `<name>/<session>/<node>`. `fresh_prompt` makes a prompt for each request,
        in place of its node's.
        """
        self._sessions = sessions
        self._name = name
        self._common = common
        self._chat = chat
        self._extra = extra
        self._fresh_prompt = fresh_prompt
        self._encode = msgspec.json.Encoder().encode

    def build(self, session: int, node: int, history: History) -> PlannedRequest:
        """Return the request; completion tokens are checked only if `ignore_eos` fixes them.

        Raises:
            ValueError: token ids for a chat endpoint.
        """
        graph = self._sessions[session]
        planned = graph.nodes[node]
        if self._fresh_prompt is not None:
            planned = msgspec.structs.replace(planned, prompt=self._fresh_prompt())
        body = {**self._common, "max_tokens": planned.max_tokens, **self._extra}
        prompt_tokens: int | None = None
        if self._chat:
            body["messages"] = _messages(planned, history)
        else:
            prompt = _joined(planned, history)
            body["prompt"] = prompt
            prompt_tokens = None if isinstance(prompt, str) else len(prompt)
        return PlannedRequest(
            request_id=f"{self._name}/{graph.id}/{planned.id}",
            body=self._encode(body),
            prompt_tokens=prompt_tokens,
            completion_tokens=body["max_tokens"] if body.get("ignore_eos") else None,
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
