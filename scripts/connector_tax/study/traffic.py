"""Send a user's requests (a trace or prompts) instead of random requests of one shape.

Every launch sends the same requests in the same order. A trace's prompts are random; two of them
are equal as far as their block ids are equal. Each launch draws other tokens, so that launches
share no prefix.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from connector_tax.artifacts.study_records import ServedSection, TrafficSection
from connector_tax.loadgen.prompts import read_prompts
from connector_tax.loadgen.sessions import Prompt, RequestSource, session_bodies
from connector_tax.loadgen.trace import TracePrompts, read_trace, trace_words


@dataclass(frozen=True, slots=True)
class Recorded:
    """The `count` requests of a cell; a trace also has their starts, in ns after the origin."""

    count: int
    requests: RequestSource
    offsets_ns: NDArray[np.int64] | None


def recorded_requests(
    path: Path, traffic: TrafficSection, served: ServedSection, stream: str, name: str, first: int
) -> Recorded:
    """Return the requests of a study's traffic.jsonl.

    Args:
        stream: the random stream of a trace's tokens.
        name: the path-like name of the cell's content.
        first: the lowest token id of a prompt.

    Raises:
        ValueError: a line is not a request; names file, line and key.
        OSError: the file cannot be read.
    """
    chat, vocabulary = bool(served.get("chat")), served["vocab_size"]
    common: dict[str, Any] = {"model": served["model"], "stream": True}
    if served.get("body") != "bare":
        common["stream_options"] = {"include_usage": True}
    extra: dict[str, Any] = {"temperature": 0}
    offsets_ns = None
    if traffic["kind"] == "trace":
        trace = read_trace(path, block=traffic["block"])
        sessions, offsets_ns = trace.singles, trace.offsets_ns(traffic["speed"])
        if served.get("exact_output", True):
            extra["ignore_eos"] = True
        prompt_of: Callable[[int], Prompt] = trace_words(trace, stream)
        if vocabulary is not None:
            tokens = TracePrompts(trace, stream, vocabulary - first)
            prompt_of = lambda k: [first + token for token in tokens(k)]  # noqa: E731
    else:
        prompts = read_prompts(path, chat, traffic["max_tokens"])
        sessions, prompt_of = prompts.singles(len(prompts)), prompts
    build = session_bodies(sessions, name, common, chat, extra, prompt_of)
    count = len(sessions)
    requests = (
        msgspec.structs.replace(build(k, 0, ()), request_id=f"{name}/{k}") for k in range(count)
    )
    return Recorded(count, requests, offsets_ns)
