"""The bodies of vLLM's requests, as far as the engine reads them, and what it refuses."""

from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


class ApiError(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param


class StreamOptions(msgspec.Struct):
    """What else to stream."""

    include_usage: bool = False


class Generation(msgspec.Struct):
    """The fields completions and chat have in common; those not named here have no effect."""

    model: str | None = None
    min_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    n: int | None = None
    stop: str | list[str] | None = None


class CompletionRequest(Generation):
    """POST /v1/completions."""

    prompt: str | list[Any] = msgspec.field(default_factory=list)
    max_tokens: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: int | None = None
    best_of: int | None = None


class ChatMessage(msgspec.Struct):
    """One message of a chat."""

    role: str
    content: str | list[dict[str, Any]] | None = None


class ChatRequest(Generation):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = msgspec.field(default_factory=list)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    tools: list[Any] | None = None
    response_format: dict[str, Any] | None = None


class TokenizeRequest(msgspec.Struct):
    """POST /tokenize."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None


def parse_body(body: bytes, kind: type[T]) -> T:
    """A request's body; ApiError where it is not one."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"Invalid request body: {error}") from error


def chat_text(messages: list[ChatMessage]) -> str:
    """The text that a chat's messages become a prompt as."""
    words = []
    for message in messages:
        words.append(message.role)
        if isinstance(message.content, str):
            words.append(message.content)
        else:
            words.extend(str(part.get("text", "")) for part in message.content or [])
    return " ".join(words)


def refuse_unsupported(body: Generation, unset: tuple[str, ...], single: tuple[str, ...]) -> None:
    """Raise ApiError where a field of `unset` is set, or one of `single` is not 1."""
    for name in unset:
        if getattr(body, name):
            raise ApiError(400, f"{name} is not supported by the embedded engine", name)
    for name in single:
        if getattr(body, name) not in (None, 1):
            raise ApiError(400, f"{name} must be 1 on the embedded engine", name)
