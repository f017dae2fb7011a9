"""The HTTP routes of one engine, compatible with vLLM.

Names, routes and shapes follow vLLM 0.32. Sampling parameters are accepted without effect, since
the emulated model is deterministic. Unsupported features (several choices, log probabilities, stop
strings, tools) are rejected, not ignored.
"""

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Callable
from typing import Any, TypeVar
from zlib import crc32

import msgspec

from connector_tax import __version__
from connector_tax.engine.completion import (
    TOKEN_BYTES,
    Answer,
    Completion,
    FaultyCompletion,
    Vocabulary,
    natural_length,
    prompt_bytes,
)
from connector_tax.engine.faults import FaultKind
from connector_tax.engine.http import HttpProtocol, Request, error_body
from connector_tax.engine.kv import block_digests
from connector_tax.engine.logs import LineLog, RequestTruth
from connector_tax.engine.loop import Engine
from connector_tax.engine.scheduler import Sequence

_METRICS_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
_DEFAULT_MAX_TOKENS = 16

Route = Callable[[Request, HttpProtocol], None]
Body = TypeVar("Body")


class ApiError(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param


class StreamOptions(msgspec.Struct):
    """The stream options of a request."""

    include_usage: bool = False


class Generation(msgspec.Struct):
    """The request fields shared by completions and chat; other fields have no effect."""

    model: str | None = None
    min_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    n: int | None = None
    stop: str | list[str] | None = None


class CompletionRequest(Generation):
    """The body of POST /v1/completions."""

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
    """The body of POST /v1/chat/completions."""

    messages: list[ChatMessage] = msgspec.field(default_factory=list)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    tools: list[Any] | None = None
    response_format: dict[str, Any] | None = None


class Application:
    """The request handler of all connections."""

    def __init__(self, engine: Engine, truth_log: LineLog | None) -> None:
        self._engine = engine
        self._truth_log = truth_log
        self._model = engine.config.model
        self._faults = engine.config.faults
        self._vocabulary = Vocabulary(self._model.vocab_size)
        self._arrivals = itertools.count()
        self._started_s = int(time.time())
        self._live: dict[Completion, Sequence] = {}
        self._routes: dict[str, dict[str, Route]] = {
            "/health": {"GET": self._health},
            "/version": {"GET": self._version},
            "/v1/models": {"GET": self._models},
            "/metrics": {"GET": self._metrics},
            "/v1/completions": {"POST": self._completions},
            "/v1/chat/completions": {"POST": self._chat},
        }

    def handle(self, request: Request, protocol: HttpProtocol) -> None:
        """Answer one request, at once or as its tokens are generated."""
        methods = self._routes.get(request.path)
        try:
            if methods is None:
                raise ApiError(404, "Not Found")
            route = methods.get("GET" if request.method == "HEAD" else request.method)
            if route is None:
                raise ApiError(405, "Method Not Allowed")
            route(request, protocol)
        except ApiError as error:
            body = error_body(error.status, str(error), error.param)
            protocol.respond(error.status, body)

    def end_all(self) -> None:
        """End every unfinished response, because the server stops."""
        for completion in list(self._live):
            completion.close("stopped")

    # -- the small routes -----------------------------------------------------------------------

    def _health(self, _: Request, protocol: HttpProtocol) -> None:
        protocol.respond(503 if self._engine.dead else 200, b"")

    def _version(self, _: Request, protocol: HttpProtocol) -> None:
        _json(protocol, {"version": f"0.32.0+embedded.{__version__}"})

    def _models(self, _: Request, protocol: HttpProtocol) -> None:
        card = {
            "id": self._model.served_name,
            "object": "model",
            "created": self._started_s,
            "owned_by": "connector-tax embedded engine (emulated)",
            "root": self._model.served_name,
            "parent": None,
            "max_model_len": self._model.max_model_len,
            "permission": [],
        }
        _json(protocol, {"object": "list", "data": [card]})

    def _metrics(self, _: Request, protocol: HttpProtocol) -> None:
        fault = self._faults.for_scrape()
        if fault is not None and fault.kind is FaultKind.SLOW_METRICS:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(fault.ms / 1000, lambda: self._send_metrics(protocol))
            protocol.on_disconnect = timer.cancel
        elif fault is not None:
            protocol.respond(200, b"vllm:num_requests_waiting{engine= 1\n\xff\n", _METRICS_TYPE)
        else:
            self._send_metrics(protocol)

    def _send_metrics(self, protocol: HttpProtocol) -> None:
        engine = self._engine
        page = engine.metrics.render(engine.scheduler, engine.config.scheduler)
        protocol.respond(200, page, _METRICS_TYPE)

    # -- completions ----------------------------------------------------------------------------

    def _completions(self, request: Request, protocol: HttpProtocol) -> None:
        body = parse_body(request.body, CompletionRequest)
        refuse_unsupported(body, ("echo", "suffix", "logprobs", "stop"), ("n", "best_of"))
        prompt = self._prompt_ids(body.prompt)
        max_tokens = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        self._generate(request, protocol, body, prompt, max_tokens, chat=False)

    def _chat(self, request: Request, protocol: HttpProtocol) -> None:
        body = parse_body(request.body, ChatRequest)
        refuse_unsupported(body, ("logprobs", "stop", "tools", "response_format"), ("n",))
        if not body.messages:
            raise ApiError(400, "messages must hold at least one message", "messages")
        prompt = self._vocabulary.tokenize(chat_text(body.messages))
        wanted = body.max_completion_tokens
        if wanted is None:
            wanted = body.max_tokens
        if wanted is None:
            wanted = max(1, self._model.max_model_len - len(prompt))
        self._generate(request, protocol, body, prompt, wanted, chat=True)

    def _generate(
        self,
        request: Request,
        protocol: HttpProtocol,
        body: Generation,
        prompt: list[int],
        max_tokens: int,
        *,
        chat: bool,
    ) -> None:
        if body.model not in (None, self._model.served_name):
            raise ApiError(404, f"The model `{body.model}` does not exist.", "model")
        self._check_lengths(len(prompt), max_tokens, body.min_tokens or 0)
        if self._engine.dead:
            raise ApiError(500, self._engine.dead)
        arrival = next(self._arrivals)
        given = request.headers.get(b"x-request-id")
        request_id = given.decode("latin-1") if given else f"{arrival:016x}"
        fault = self._faults.for_request()
        packed = prompt_bytes(prompt)
        seed = crc32(packed)
        limit = max_tokens
        if not body.ignore_eos:
            limit = min(max_tokens, max(natural_length(seed), body.min_tokens or 0))
        reason = "length" if limit == max_tokens else "stop"
        if fault is not None and fault.kind is FaultKind.WRONG_LENGTH:
            limit = max(1, limit + fault.tokens)
        answer = Answer(
            request_id=request_id,
            created=int(time.time()),
            model=self._model.served_name,
            chat=chat,
            stream=bool(body.stream),
            include_usage=bool(body.stream_options and body.stream_options.include_usage),
            prompt_tokens=len(prompt),
            finish_reason=reason,
            seed=seed,
        )
        block_size = self._engine.config.scheduler.kv_block_size
        kind = Completion if fault is None else FaultyCompletion
        completion = kind(answer, request, protocol, self._vocabulary, fault, self._ended)
        digests = block_digests(packed, TOKEN_BYTES, block_size)
        sequence = Sequence(arrival, answer.prompt_tokens, limit, digests, completion)
        self._live[completion] = sequence
        if fault is not None and fault.kind is FaultKind.DIE:
            os.kill(os.getpid(), signal.SIGKILL)
        if fault is not None and fault.kind is FaultKind.PREFIX_HIT:
            self._engine.metrics.extra_prefix_hits += block_size
        if fault is not None and fault.kind in (FaultKind.HTTP_429, FaultKind.HTTP_500):
            status = 429 if fault.kind is FaultKind.HTTP_429 else 500
            completion.respond(status, error_body(status, "injected fault"), 0, fault.kind)
            return
        protocol.on_disconnect = lambda: completion.close("disconnected")
        completion.begin()
        self._engine.submit(sequence)

    def _ended(self, completion: Completion, truth: RequestTruth) -> None:
        sequence = self._live.pop(completion)
        self._engine.abort(sequence)
        truth.preemptions = sequence.preemptions
        if self._truth_log is not None:
            self._truth_log.write(truth)

    # -- checks ---------------------------------------------------------------------------------

    def _check_lengths(self, prompt_len: int, max_tokens: int, min_tokens: int) -> None:
        limit = self._model.max_model_len
        if prompt_len == 0:
            raise ApiError(400, "The prompt must hold at least one token", "prompt")
        if max_tokens < 1:
            raise ApiError(400, f"max_tokens must be at least 1, got {max_tokens}.", "max_tokens")
        if not 0 <= min_tokens <= max_tokens:
            raise ApiError(
                400,
                f"min_tokens must be between 0 and max_tokens={max_tokens}, got {min_tokens}.",
                "min_tokens",
            )
        if prompt_len + max_tokens > limit:
            raise ApiError(
                400,
                f"This model's maximum context length is {limit} tokens. However, you requested "
                f"{max_tokens} output tokens and your prompt contains {prompt_len} input tokens, "
                f"for a total of {prompt_len + max_tokens} tokens.",
                "max_tokens",
            )

    def _prompt_ids(self, prompt: str | list[Any]) -> list[int]:
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], (list, str)):
            if len(prompt) > 1:
                raise ApiError(400, "one prompt for each request is supported", "prompt")
            prompt = prompt[0]
        if isinstance(prompt, str):
            return self._vocabulary.tokenize(prompt)
        if not all(type(token) is int for token in prompt):
            raise ApiError(400, "prompt must be text or a list of token ids", "prompt")
        outside = self._vocabulary.outside(prompt) if prompt else None
        if outside is not None:
            raise ApiError(400, f"Token id {outside} is out of vocabulary", "prompt")
        return prompt


def parse_body(body: bytes, kind: type[Body]) -> Body:
    """Return a request's body; raise ApiError if it is invalid."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"Invalid request body: {error}") from error


def chat_text(messages: list[ChatMessage]) -> str:
    """Return the prompt text for a chat's messages."""
    words = []
    for message in messages:
        words.append(message.role)
        if isinstance(message.content, str):
            words.append(message.content)
        else:
            words.extend(str(part.get("text", "")) for part in message.content or [])
    return " ".join(words)


def refuse_unsupported(body: Generation, unset: tuple[str, ...], single: tuple[str, ...]) -> None:
    """Raise ApiError if a field of `unset` is set, or one of `single` is not 1."""
    for name in unset:
        if getattr(body, name):
            raise ApiError(400, f"{name} is not supported by the embedded engine", name)
    for name in single:
        if getattr(body, name) not in (None, 1):
            raise ApiError(400, f"{name} must be 1 on the embedded engine", name)


def _json(protocol: HttpProtocol, value: Any) -> None:
    protocol.respond(200, msgspec.json.encode(value))
