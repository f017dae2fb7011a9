"""Test that events do not depend on line ends or on where the bytes are cut."""

import itertools
import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector_tax.loadgen.messages import RequestFailed
from connector_tax.loadgen.sse import MAX_EVENT_BYTES, EventSplitter, StreamAccumulator
from tests.loadgen.fault_server import event, token, usage

ENDINGS = st.sampled_from(["\n", "\r\n", "\r"])
LINES = st.lists(
    st.text(st.characters(codec="ascii", exclude_characters="\r\n"), min_size=1), min_size=1
)


def cut(data: bytes, points: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(p % (len(data) + 1) for p in points)})
    return [data[a:b] for a, b in itertools.pairwise(edges)]


@given(st.lists(LINES, max_size=6), ENDINGS, st.lists(st.integers(0, 10_000), max_size=30))
def test_events_are_split_independently_of_chunks_and_line_ends(
    events: list[list[str]], ending: str, points: list[int]
) -> None:
    stream = "".join(ending.join(lines) + ending * 2 for lines in events).encode()
    splitter = EventSplitter()
    got = b"".join(splitter.feed(piece) for piece in cut(stream, points))
    assert got == "".join("\n".join(lines) + "\n\n" for lines in events).encode()
    assert splitter.rest == b""


@given(ENDINGS, st.integers(1, 40), st.lists(st.integers(0, 10_000), max_size=30), st.booleans())
def test_token_counts_are_independent_of_chunks_and_line_ends(
    ending: str, tokens: int, points: list[int], spaced: bool
) -> None:
    datas = [token() for _ in range(tokens - 1)] + [token(finish="length"), usage(5, tokens)]
    if spaced:
        datas = [json.dumps(json.loads(data)) for data in datas]
    stream = b"".join(event(data, ending) for data in [*datas, "[DONE]"])
    accumulator = StreamAccumulator(chat=False, capture="counts")
    assert sum(accumulator.feed(piece) for piece in cut(stream, points)) == tokens
    assert not accumulator.lacks_done(strict=True)
    assert accumulator.usage is not None
    assert accumulator.usage.completion_tokens == tokens
    assert accumulator.end() == "length"


@given(st.lists(st.text(max_size=20), min_size=1, max_size=20), st.lists(st.integers(0, 9999)))
def test_text_is_collected_exactly_and_counts_agree(texts: list[str], points: list[int]) -> None:
    """Check texts of which some look like a field of the protocol."""
    stream = b"".join([*(event(token(text)) for text in texts), event("[DONE]")])
    collecting = StreamAccumulator(chat=False, capture="text")
    counting = StreamAccumulator(chat=False, capture="counts")
    for piece in cut(stream, points):
        assert collecting.feed(piece) == counting.feed(piece)
    assert [choice.text for choice in collecting.choices] == texts
    silent = next((k for k, text in enumerate(texts) if text), len(texts))
    assert (counting.silent, counting.token_events) == (silent, len(texts) - silent)


@pytest.mark.parametrize(
    "text",
    ['"text":"', '"finish_reason":"', "[DONE]", '"error"', '"usage":{', '"choices":[]', "\n\n"],
)
def test_text_that_looks_like_the_protocol_stays_text(text: str) -> None:
    accumulator = StreamAccumulator(chat=False, capture="counts")
    assert accumulator.feed(b"".join([event(token()), event(token(text)), event(token())])) == 3
    assert not accumulator.done
    assert accumulator.end() is None


REASONED = [
    {"role": "assistant", "content": ""},
    *[{"reasoning_content": f"r{k}"} for k in range(5)],
    *[{"content": f"a{k}"} for k in range(5)],
]


@pytest.mark.parametrize(
    ("deltas", "tokens", "answer"),
    [
        (REASONED, 10, 6),
        ([{**d, "content": d.get("content", "")} for d in REASONED], 10, 6),
        ([{**d, "content": d.get("content")} for d in REASONED], 10, 6),
        ([{"reasoning": "r"}, {"reasoning": "s"}, {"content": "a"}], 3, 3),
        ([{"role": "assistant", "reasoning_content": "r"}, {"content": "a"}], 2, 2),
        ([{"reasoning_content": "r", "content": None}] * 3, 3, None),
        ([{"role": "assistant", "content": None, "tool_calls": [{"index": 0}]}] * 3, 0, None),
        ([{"content": None, "tool_calls": [{"function": {"name": "f"}}]}] * 3, 3, 1),
        ([{"reasoning_content": "r"}, {"tool_calls": [{"function": {"arguments": "{"}}]}], 2, 2),
        ([{"content": "a"}, {"content": ""}, {"content": "half a character before"}], 3, 1),
    ],
)
@pytest.mark.parametrize("whole", [True, False])
def test_reasoning_and_tool_calls_count_as_tokens_before_the_first_answer(
    deltas: list[dict[str, object]], tokens: int, answer: int | None, whole: bool
) -> None:
    """Check the number of tokens before the first token of the answer (`answer`)."""
    choices = [{"delta": delta, "finish_reason": None} for delta in deltas]
    encoded = [json.dumps({"choices": [c]}, separators=(",", ":")) for c in choices]
    end = json.dumps({"choices": [{"delta": {}, "finish_reason": "length"}]})
    accumulator = StreamAccumulator(chat=True, capture="counts")
    first = None
    for data in encoded:
        accumulator.feed(event(data))
        if first is None and accumulator.answered:
            first = accumulator.token_events
    assert (accumulator.token_events, first) == (tokens, answer)
    # An event without content gives the finish reason, and is no token.
    accumulator.feed(event(end))
    assert accumulator.token_events == tokens
    assert accumulator.answered == (answer is not None)
    if whole:  # all in one read
        together = StreamAccumulator(chat=True, capture="counts")
        assert together.feed(b"".join(map(event, encoded))) == tokens
        assert together.answered == (answer is not None)


def test_event_over_the_size_limit_is_refused() -> None:
    splitter = EventSplitter()
    for _ in range(MAX_EVENT_BYTES // 65536):
        splitter.feed(b"x" * 65536)
    with pytest.raises(RequestFailed) as caught:
        splitter.feed(b"x")
    assert caught.value.kind == "oversized_event"


def test_parsing_single_bytes_takes_linear_time() -> None:
    """Feed ten times the bytes singly, which must not take a hundred times as long."""

    def seconds(size: int) -> float:
        splitter = EventSplitter()
        begin = time.process_time()
        for _ in range(size):
            splitter.feed(b"x")
        assert splitter.feed(b"\n\n")
        return time.process_time() - begin

    small = min(seconds(20_000) for _ in range(3))
    assert min(seconds(200_000) for _ in range(3)) < 40 * small
