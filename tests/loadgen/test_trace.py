"""Test traces: shared prefixes, sending times, and errors for malformed files."""

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connector_tax.loadgen.sessions import WORDS
from connector_tax.loadgen.trace import Trace, TraceLine, TracePrompts, read_trace, trace_words
from tests.engine.serving import launched
from tests.loadgen.fault_server import HEAD, FaultServer, Pause, Step, chunked, event, token, usage
from tests.loadgen.running import command

BLOCK = 8


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Return traces of blocks of 8 tokens whose ids repeat often, also after different ids."""
    lines = []
    for _ in range(draw(st.integers(1, 12))):
        length = draw(st.integers(1, 4 * BLOCK))
        blocks = -(-length // BLOCK)
        ids = draw(st.none() | st.tuples(*[st.integers(0, 3)] * blocks))
        lines.append(TraceLine(draw(st.integers(0, 50)), length, draw(st.integers(1, 9)), ids))
    return Trace(tuple(sorted(lines, key=lambda line: line.timestamp)), BLOCK)


def shared(first: Any, second: Any) -> int:
    """Return how many leading items are equal."""
    pairs = zip(first, second, strict=False)
    return next((k for k, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


@settings(max_examples=80, deadline=None)
@given(traces(), st.integers(0, 2**31), st.integers(16, 1000))
def test_prompts_share_exactly_the_blocks_of_their_common_leading_hash_ids(
    trace: Trace, seed: int, vocabulary: int
) -> None:
    prompts = TracePrompts(trace, f"{seed}", vocabulary)
    made = [prompts(k) for k in range(len(trace))]
    assert made == [TracePrompts(trace, f"{seed}", vocabulary)(k) for k in range(len(trace))]
    assert all(0 <= token < vocabulary for prompt in made for token in prompt)
    assert [len(prompt) for prompt in made] == [line.input_length for line in trace.lines]
    for a, b in combinations(range(len(trace)), 2):
        ids = shared(trace.lines[a].hash_ids or (), trace.lines[b].hash_ids or ())
        shortest = min(len(made[a]), len(made[b]))
        assert shared(made[a], made[b]) == min(ids * BLOCK, shortest)


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 12), st.integers(1, 150))
def test_blocks_stay_distinct_with_more_blocks_than_token_ids(vocabulary: int, count: int) -> None:
    trace = Trace(tuple(TraceLine(k, BLOCK, 1, (k,)) for k in range(count)), BLOCK)
    prompts = TracePrompts(trace, "seed", vocabulary)
    digits = next(d for d in range(1, 9) if vocabulary**d >= count)
    assert len({tuple(prompts(k)[:digits]) for k in range(count)}) == count


@settings(max_examples=25, deadline=None)
@given(traces())
def test_word_prompts_share_the_same_prefixes_as_token_prompts(trace: Trace) -> None:
    words = trace_words(trace, "seed")
    made = [words(k).split() for k in range(len(trace))]
    assert {word for prompt in made for word in prompt} <= set(WORDS)
    for (a, first), (b, second) in combinations(enumerate(made), 2):
        ids = shared(trace.lines[a].hash_ids or (), trace.lines[b].hash_ids or ())
        assert shared(first, second) == min(ids * BLOCK, len(first), len(second))


def test_prompts_of_different_seeds_share_no_block() -> None:
    trace = Trace((TraceLine(0, 64, 1, tuple(range(8))),), BLOCK)
    first, second = (TracePrompts(trace, seed, 1000)(0) for seed in ("1/trace", "2/trace"))
    assert sum(a == b for a, b in zip(first, second, strict=True)) < 8


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("", "2: Input data was truncated"),
        ("[1]", "2: Expected `object`"),
        ('{"timestamp": 0, "input_length": 5}', "output_length"),
        ('{"timestamp": -1, "input_length": 5, "output_length": 1}', "$.timestamp"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 1}', "$.input_length"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 0}', "$.output_length"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1, "delay": 3}', "`delay`"),
        ('{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}',
         "hash_ids has 1 ids for an input_length of 513; allowed: 2"),
    ],
)  # fmt: skip
def test_trace_error_names_the_bad_line(line: str, named: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    good = {"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}
    path.write_text(f"{json.dumps(good)}\n{line}\n")
    with pytest.raises(ValueError) as caught:
        read_trace(path)
    assert f"{path}:2: " in str(caught.value)
    assert named in str(caught.value)
    assert len(read_trace(path, limit=1)) == 1


def write_trace(folder: Path, *lines: tuple[int, int, int, list[int]]) -> str:
    """Write stamps, lengths and ids as a trace; return its path."""
    path = folder / "trace.jsonl"
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text("".join(json.dumps(dict(zip(keys, x, strict=True))) + "\n" for x in lines))
    return str(path)


def by_lengths(*lengths: tuple[int, int]) -> FaultServer:
    """Return a server that answers with the requested number of tokens."""

    def answer(prompt: int, output: int) -> list[Step]:
        steps: list[Step] = [HEAD]
        for left in reversed(range(output)):
            steps += [chunked(event(token(finish=None if left else "length")), last=False)]
            steps += [Pause(0.02)]
        return [*steps, chunked(event(usage(prompt, output)), event("[DONE]"))]

    scripts = {f"{prompt} {output}": answer(prompt, output) for prompt, output in lengths}
    return FaultServer(scripts, lambda body: f"{len(body['prompt'])} {body['max_tokens']}")


def test_trace_requests_are_sent_at_their_times_and_lengths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [(5000, 12, 1, [1, 2]), (5000, 9, 3, [1, 3]), (5000, 8, 1, [4]), (5600, 16, 2, [1, 2])]
    path = write_trace(tmp_path, *rows)
    with by_lengths((12, 1), (9, 3), (8, 1), (16, 2)) as server:
        options = f"--trace {path} --trace-block 8 --trace-speed 2"
        status, summary, records = command(server.port, tmp_path, options)
        bodies = server.bodies
    printed = " ".join(capsys.readouterr().out.split())
    assert status in (0, 1), "1: the machine was too busy to keep the timing"
    due_ms = [round((r["t_intended_ns"] - records[0]["t_intended_ns"]) / 1e6) for r in records]
    assert due_ms == [0, 0, 0, 300]
    assert summary["ok"] == 4
    assert all(body["ignore_eos"] for body in bodies)
    prompts = {len(body["prompt"]): body["prompt"] for body in bodies}
    assert prompts[16][:12] == prompts[12]
    assert prompts[9][:8] == prompts[12][:8] != prompts[8]
    assert "4 requests at 2 stamps over 0.3 s (speed 2)" in printed
    assert "all 4 requests of the trace were used, which ended the run" in printed
    assert "2 of 4 have no TPOT: they had one token, or all tokens in one read" in printed


def test_prefix_cache_hits_equal_the_hash_ids_that_requests_share(
    tmp_path: Path,
) -> None:
    # In blocks of 16 tokens: 32 for each id; the last token of a prompt is always computed.
    rows = [
        (0, 1024, 2, [1, 2]),
        (300, 1100, 2, [1, 2, 3]),  # 1024 found
        (600, 1024, 2, [4, 2]),  # the same id after another one: none
        (900, 700, 2, [1, 5]),  # 512
    ]
    path = write_trace(tmp_path, *rows)
    with launched(tmp_path, changes={"step_cost": {"jitter_rel_sd": 0.0}}) as server:
        before = server.metrics()["vllm:prefix_cache_hits_total"]
        _, summary, _ = command(server.port, tmp_path, f"--trace {path} --vocabulary 32000")
        hits = server.metrics()["vllm:prefix_cache_hits_total"] - before
    assert (summary["ok"], hits) == (4, 1024 + 512)
