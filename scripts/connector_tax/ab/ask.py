"""Query a server: its model, and the form of requests that it accepts.

The server is started as in the study's launches. Nothing is guessed: /v1/models gives the model's
name and length, the vocabulary ends where vLLM rejects a token id, and the server's own counts give
the tokens per word.
"""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import httpx

from connector_tax.ab.arguments import BASELINE
from connector_tax.analysis.validity import server_counters
from connector_tax.artifacts import paths
from connector_tax.artifacts.launch_files import SettingRecord
from connector_tax.artifacts.study_records import EngineSection, ServedSection
from connector_tax.loadgen.sessions import random_words
from connector_tax.servers.command import running_url, server_command
from connector_tax.servers.kinds import STEP_LOG_PREFIX, STEP_LOG_PROCESSES, ServerError, free_port
from connector_tax.study.cell import ALIVE_S, FIRST_PLAIN_TOKEN
from connector_tax.study.guard import kill_leftovers
from connector_tax.study.resources import engine_record, remove_settings
from connector_tax.study.scraper import parse_metrics
from connector_tax.study.server import Server
from connector_tax.vllm.evidence import dead_reason
from connector_tax.vllm.step_records import ask_to_write

GRACE_S = 20.0
ANSWER_S = 60.0
PROMPT_TOKENS, ANSWER_TOKENS = 32, 8
# Number of words in two prompts, whose token counts give the tokens per word.
FEW_WORDS, MANY_WORDS = 8, 264
MOST_TOKEN_IDS = 2**22
# Keys of a request, from most to fewest: vLLM's own, usage, neither.
BODIES: Mapping[str, dict[str, Any]] = {
    "vllm": {
        "min_tokens": ANSWER_TOKENS,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    },
    "openai": {"stream_options": {"include_usage": True}},
    "bare": {},
}


class AskError(Exception):
    """A server cannot be measured; the text names the server and the cause."""


class _WrongAnswer(Exception):
    """An answer violates the protocol; the text names the request."""


@dataclass(frozen=True)
class Asked:
    """The properties of one server: its model, its resolved settings, its label."""

    served: ServedSection
    settings: Mapping[str, SettingRecord]
    startup_s: float
    label: str


@contextlib.contextmanager
def asked(
    name: str,
    section: EngineSection,
    root: Path,
    *,
    timeout_s: float,
    model: str | None,
    chat: bool,
    ids: bool,
    say: Callable[[str], object],
) -> Iterator[tuple[Server, Asked]]:
    """Start a command's server, yield it with its properties once ready, and stop it afterwards.

    Args:
        name: the baseline's or a candidate's name; candidates also start the --beside commands.
        root: the study's folder, which holds the step probe.
        model: the name of the model to request; None for the server's only one.
        chat: use only the chat endpoint.
        ids: send token ids if the server takes them.
        say: called with each problem of the server's answers until the server is ready.

    Raises:
        AskError: the server does not start, lacks the model, answers no request, or does not end.
    """
    folder = root / paths.PREFLIGHT / name
    try:
        kill_leftovers(root)
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob(f"{STEP_LOG_PREFIX}.*"):
            path.unlink()
        port = free_port()
        command = server_command(section, name, BASELINE, port, root / paths.PATCH / "overlay")
        server = Server(folder, command, f"{name}, started to query its properties", port)
        server.start()
        try:
            startup_s = server.wait_ready(timeout_s, lambda text: say(f"{name}: {text}"))
            reply = _while_alive(
                server, lambda: _ask(name, section, server, startup_s, model, chat=chat, ids=ids)
            )
            if dead := dead_reason(server.log_text(), section["device"], server.command.argv):
                raise AskError(f"{name}: its connector cannot transfer: {dead}")
            yield server, reply
        finally:
            server.stop(GRACE_S)
    except ServerError as error:
        raise AskError(f"{name}: {error}") from error


def _while_alive(server: Server, query: Callable[[], Asked]) -> Asked:
    """Return the result of a query, which a server without its engine may never answer.

    Raises:
        ServerError: the server or its engine ended meanwhile.
        Exception: any error of the query.
    """
    result: Future[Asked] = Future()

    def work() -> None:
        try:
            result.set_result(query())
        except Exception as error:
            result.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    while True:
        wait([result], ALIVE_S)
        if result.done():
            return result.result()
        server.check_alive("while it was queried")


def _ask(name: str, section: EngineSection, server: Server, startup_s: float,
         model: str | None, *, chat: bool, ids: bool) -> Asked:  # fmt: skip
    with server.endpoint.client(ANSWER_S) as client:
        try:
            card = _model_card(name, client, model)
            served = _served(name, client, card, chat, ids)
        except _WrongAnswer as error:
            raise AskError(f"{name}: {error}") from error
        except (httpx.HTTPError, ValueError, KeyError, TypeError, IndexError) as error:
            server.check_alive("while it was queried")
            raise AskError(f"{name}: {type(error).__name__}: {error}") from error
    page = server.get("/metrics")
    values: dict[str, float] = {}
    with contextlib.suppress(ValueError):
        values = parse_metrics(page or "")
    served["counters"] = None not in server_counters(values).values()
    served["no_steps"] = _no_steps(server.folder, served)
    settings = engine_record(server, {**section, "served": served}, page)["settings"]
    remove_settings(server.folder)
    owner, version = str(card.get("owned_by", "")), served["version"]
    what = f"vLLM {version}" if version and served["counters"] else "server"
    label = "embedded (emulated)" if "emulated" in owner else f"{what[:30]} by its command"
    if running_url(section["commands"][name]) is not None:
        label = f"{label.removesuffix(' by its command')}, launches not replicated"
    return Asked(served, settings, startup_s, label)


def _model_card(name: str, client: httpx.Client, model: str | None) -> dict[str, Any]:
    listed = client.get("/v1/models")
    if listed.status_code != httpx.codes.OK:
        if model is None:
            raise AskError(f"{name}: /v1/models answers {listed.status_code}; name the model"
                           " to request with --model")  # fmt: skip
        return {"id": model}
    try:
        cards = {str(card["id"]): card for card in _object("/v1/models", listed.text)["data"]}
    except (KeyError, TypeError) as error:
        raise _WrongAnswer(f"/v1/models answers {listed.text[:200]!r}; allowed: a list of"
                           " models") from error  # fmt: skip
    if model is None and len(cards) == 1:
        return dict(next(iter(cards.values())))
    if model not in cards:
        names = ", ".join(cards) or "none"
        wanted = "choose one with --model" if model is None else f"--model names {model}"
        raise AskError(f"{name}: /v1/models names {names}; {wanted}")
    return dict(cards[model])


def _served(
    name: str, client: httpx.Client, card: Mapping[str, Any], only_chat: bool, takes_ids: bool
) -> ServedSection:
    model = str(card["id"])
    ids = list(range(FIRST_PLAIN_TOKEN, FIRST_PLAIN_TOKEN + PROMPT_TOKENS))
    words = "one two three"
    refusals = []
    endpoints = (("/v1/completions", False), ("/v1/chat/completions", True))
    for path, chat in endpoints[only_chat:]:
        request = _chat(words) if chat else {"prompt": ids if takes_ids else words}
        for body, keys in BODIES.items():
            answered = _stream(client, path, {"model": model, **request, **keys})
            if isinstance(answered, str) and not chat:
                # The same requests with text instead of token ids.
                answered = _stream(client, path, {"model": model, "prompt": words, **keys})
            if isinstance(answered, str):
                refusals.append(f"{path}: {answered}")
                continue
            return _as_served(client, card, path, body, answered)
    raise AskError(f"{name}: no request was answered; {refusals[0]}; {refusals[-1]}")


def _as_served(
    client: httpx.Client, card: Mapping[str, Any], path: str, body: str, usage: Mapping[str, Any]
) -> ServedSection:
    model, chat = str(card["id"]), path.endswith("chat/completions")
    longest = card.get("max_model_len")
    served: ServedSection = {
        "model": model,
        "vocab_size": None,
        "chat": chat,
        "body": body,
        "exact_output": body == "vllm" and usage.get("completion_tokens") == ANSWER_TOKENS,
        "max_model_len": longest if type(longest) is int else None,
        "version": _version(client),
    }
    if usage.get("prompt_tokens") == PROMPT_TOKENS and not chat:
        served["vocab_size"] = _vocabulary(client, model)
    if served["vocab_size"] is None:
        served |= _words(client, path, model, body)  # type: ignore[typeddict-item]
    return served


def _version(client: httpx.Client) -> str | None:
    """Return the server's version; None if unknown, as where a page answers every path."""
    answer = client.get("/version")
    with contextlib.suppress(_WrongAnswer):
        version = _object("/version", answer.text).get("version")
        if answer.status_code == httpx.codes.OK and isinstance(version, str):
            return version
    return None


def _chat(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def _stream(client: httpx.Client, path: str, body: Mapping[str, Any]) -> dict[str, Any] | str:
    """Return the `usage` of a streamed request's answer, or why there is no answer."""
    content = {"max_tokens": ANSWER_TOKENS, "temperature": 0, "stream": True, **body}
    usage: dict[str, Any] = {}
    with client.stream("POST", path, json=content) as answer:
        if answer.status_code != httpx.codes.OK:
            return f"status {answer.status_code}: {answer.read()[:300].decode(errors='replace')}"
        for line in answer.iter_lines():
            if line.startswith("data:") and line[5:].strip() != "[DONE]":
                event = _object(path, line[5:])
                # Some servers send `"error": null` with each event.
                if event.get("error") is not None:
                    return f"error {event['error']}"
                if isinstance(event.get("usage"), dict):
                    usage = event["usage"]
    return usage


def _object(path: str, text: str) -> dict[str, Any]:
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(read := json.loads(text), dict):
            return read
    raise _WrongAnswer(f"{path} answers {text.strip()[:200]!r}; allowed: a JSON object")


def _vocabulary(client: httpx.Client, model: str) -> int | None:
    """Return the lowest token id that the server rejects; None if there is no known limit."""

    def takes(token: int) -> bool | None:
        body = {"model": model, "prompt": [token], "max_tokens": 1}
        answer = client.post("/v1/completions", json=body)
        refused = "vocab" in answer.text
        return True if answer.status_code == httpx.codes.OK else False if refused else None

    # Only a server that rejects a wrong id with a message is tested further; others might crash.
    if client.get("/metrics").text.find("vllm:") < 0 or takes(MOST_TOKEN_IDS) is not False:
        return None
    known, refused = FIRST_PLAIN_TOKEN, MOST_TOKEN_IDS
    while refused - known > 1:
        middle = (known + refused) // 2
        known, refused = (middle, refused) if takes(middle) else (known, middle)
    return known + 1


def _words(client: httpx.Client, path: str, model: str, body: str) -> dict[str, float]:
    """Return tokens per word (1 if the server does not count), and tokens of an empty prompt."""
    counts = []
    for words in (FEW_WORDS, MANY_WORDS):
        text = random_words(f"ask/{words}", words)()
        request = _chat(text) if path.endswith("chat/completions") else {"prompt": text}
        answered = _stream(client, path, {"model": model, **request, **BODIES[body]})
        counts.append(None if isinstance(answered, str) else answered.get("prompt_tokens"))
    few, many = counts
    if type(few) is not int or type(many) is not int or many <= few:
        return {"tokens_per_word": 1.0, "fixed_tokens": 0}
    each = (many - few) / (MANY_WORDS - FEW_WORDS)
    return {"tokens_per_word": each, "fixed_tokens": round(few - FEW_WORDS * each)}


def _no_steps(folder: Path, served: ServedSection) -> str | None:
    """Return why no step is recorded, or None if the step probe is installed."""
    if not served["counters"]:
        return "the step probe is for vLLM"
    logs = [folder / f"{STEP_LOG_PREFIX}.{process}.steps" for process in STEP_LOG_PROCESSES]
    for log in logs:
        ask_to_write(log)
    if all(log.exists() for log in logs):
        return None
    return "the step probe did not load in this server"


def differing(baseline: Asked, candidate: Asked) -> list[str]:
    """Return the settings in which a candidate differs from the baseline, with both values."""
    lines = []
    for name, setting in baseline.settings.items():
        other_setting = candidate.settings[name]
        if name == "hybrid_kv_cache_manager":
            continue  # differs only for hybrid models, which `weaker_notes` reports
        if setting["value"] != other_setting["value"] and None not in (
            setting["value"],
            other_setting["value"],
        ):
            lines.append(f"{name} {setting['value']} -> {other_setting['value']}")
    keys = ("model", "vocab_size", "max_model_len", "version")
    one, other = (cast(dict[str, Any], answers.served) for answers in (baseline, candidate))
    return [f"{k} {one[k]} -> {other[k]}" for k in keys if one[k] != other[k]] + lines
