"""Choose the source of requests: a session file, a trace, a prompt file or the command line."""

import argparse
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from connector_tax.loadgen.arguments import option_name
from connector_tax.loadgen.messages import Target
from connector_tax.loadgen.prompts import read_prompts
from connector_tax.loadgen.sessions import (
    Node,
    Prompt,
    Session,
    Sessions,
    Singles,
    random_tokens,
    random_words,
    read_sessions,
)
from connector_tax.loadgen.trace import TracePrompts, read_trace, trace_note, trace_words

MANY = 10**12
"""Number of sessions where no option limits it."""


@dataclass(frozen=True, slots=True)
class Source:
    """The requests that a run may send.

    `prompt_of` makes the prompt of a session whose node has none. `starts_ns` are the starts of
    sessions that have fixed times, in ns, ascending. `kind` names the items of a file, `size` is
    their number. `notes` explain the numbers in the summary.
    """

    sessions: Sessions
    prompt_of: Callable[[int], Prompt] | None = None
    starts_ns: NDArray[np.int64] | None = None
    kind: str = ""
    size: int = 0
    notes: tuple[str, ...] = ()

    @property
    def limit(self) -> int | None:
        """Return the number of sessions; None if unlimited."""
        return None if len(self.sessions) >= MANY else len(self.sessions)

    def first(self, count: int) -> Sessions:
        """Return the first `count` sessions."""
        if isinstance(self.sessions, Singles):
            return dataclasses.replace(self.sessions, count=count)
        return self.sessions[:count]

    def use(self, started: int) -> str | None:
        """Return a line on how many requests of the file were used; None without a file."""
        if not self.kind:
            return None
        if self.limit is None or started > self.size:
            return f"{started} requests from {self.size} {self.kind}, repeated in turn"
        if started == self.size:
            return f"all {self.size} {self.kind} were used, which ended the run"
        return f"{started} of {self.size} {self.kind} were used before the run ended"


def read_source(options: argparse.Namespace, target: Target) -> Source:
    """Read or prepare the requests that the options describe.

    Raises:
        ValueError, OSError: an option or a file is wrong; names it.
    """
    if options.session_file is not None:
        return _sessions(options, target)
    if options.trace is not None:
        return _trace(options, target)
    if options.prompts is not None:
        return _prompts(options, target)
    prompt_of = None
    stream = f"{options.seed}/prompts"
    if len(options.rates) > 1:
        stream += f"/{options.rate:g}"
    if options.prompt_words is not None:
        prompt_of = _drawn(random_words(stream, options.prompt_words))
    elif options.prompt_tokens is not None:
        if target.chat:
            raise ValueError(
                "--prompt-tokens makes token ids, but a chat endpoint takes text; use "
                "--prompt-words"
            )
        prompt_of = _drawn(random_tokens(stream, options.prompt_tokens, 0, options.vocabulary))
    node = Node("0", options.prompt or "", options.max_tokens)
    return Source(Singles(options.requests or MANY, node), prompt_of)


def _drawn(draw: Callable[[], str | list[int]]) -> Callable[[int], Prompt]:
    return lambda _: draw()


def _sessions(options: argparse.Namespace, target: Target) -> Source:
    path = options.session_file
    graphs = read_sessions(path)
    _check_prompts(graphs, target)
    starts_s = [session.start_s for session in graphs if session.start_s is not None]
    starts_ns = None
    if starts_s:
        if len(starts_s) < len(graphs):
            raise ValueError(
                f"{path}: start_s is set in some sessions only; set it in all or in none"
            )
        graphs.sort(key=lambda session: session.start_s or 0.0)
        starts_ns = np.rint(np.sort(starts_s) * 1e9).astype(np.int64)
    return Source(graphs, starts_ns=starts_ns, kind="sessions", size=len(graphs))


def _check_prompts(sessions: list[Session], target: Target) -> None:
    for session in sessions if target.chat else ():
        for node in session.nodes:
            if not isinstance(node.prompt, str):
                raise ValueError(
                    f"session {session.id!r}, node {node.id!r}: the prompt is token ids, but a "
                    "chat endpoint takes text"
                )


def _trace(options: argparse.Namespace, target: Target) -> Source:
    for name in ("rate", "concurrency"):
        if getattr(options, name) is not None:
            raise ValueError(f"{option_name(name)}: a trace sets the times; see --trace-speed")
    trace = read_trace(options.trace, options.trace_limit, options.trace_block)
    stream = f"{options.seed}/trace"
    if target.chat or options.trace_words:
        prompt_of: Callable[[int], Prompt] = trace_words(trace, stream)
    else:
        try:
            prompt_of = TracePrompts(trace, stream, options.vocabulary)
        except ValueError as error:
            raise ValueError(f"--vocabulary: {error}") from None
    return Source(
        trace.singles,
        prompt_of,
        trace.offsets_ns(options.trace_speed),
        kind="requests of the trace",
        size=len(trace),
        notes=(trace_note(trace, options.trace_speed),),
    )


def _prompts(options: argparse.Namespace, target: Target) -> Source:
    prompts = read_prompts(options.prompts, target.chat, options.max_tokens)
    count = options.requests
    if count is None:
        count = MANY if options.repeat else len(prompts)
    if count > len(prompts) and not options.repeat:
        raise ValueError(
            f"--requests: found {count}; allowed: up to {len(prompts)}, the prompts of "
            f"{options.prompts}, or any number with --repeat"
        )
    return Source(prompts.singles(count), prompts, kind="prompts", size=len(prompts))
