"""Test which requests of a user's file a comparison sends, and which files it rejects."""

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from connector_tax.ab.arguments import parse
from connector_tax.ab.design import planned_load
from connector_tax.ab.load import FEWEST, Load, LoadError
from connector_tax.artifacts.saturation import HALF, TENTH, effective_rps
from connector_tax.study.traffic import Recorded, recorded_requests

SERVED: Any = {"model": "m", "vocab_size": 1000, "chat": False, "exact_output": True}


def write_trace(path: Path, count: int = 400) -> Path:
    """Write a trace with a request every 100 ms; every second one shares its first 16 tokens."""
    lines = [
        {"timestamp": 100 * k, "input_length": 40, "output_length": 1 + k % 3,
         "hash_ids": [0 if k % 2 else 3 * k, 3 * k + 1, 3 * k + 2]}
        for k in range(1, count + 1)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def write_prompts(path: Path, count: int, **more: Any) -> Path:
    lines = [{"prompt": f"Say {k} in words.", **more} for k in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def load(*arguments: str, life_s: float = 1.0, startup_s: float = 2.0) -> Load:
    servers = ["--baseline", "serve {port}", "--candidate", "serve {port} -x"]
    return planned_load(parse([*servers, *arguments]), startup_s, life_s)


def recorded(of: Load, folder: Path, stream: str, served: Any = SERVED) -> Recorded:
    assert of.traffic is not None
    (folder / "traffic.jsonl").write_bytes(of.lines)
    return recorded_requests(folder / "traffic.jsonl", of.traffic, served, stream, "x", 10)


def test_a_trace_is_cut_so_that_three_blocks_fit_the_minutes(tmp_path: Path) -> None:
    path = str(write_trace(tmp_path / "t.jsonl"))
    whole = load("--trace", path, "--trace-block", "16", "--blocks", "3")
    assert whole.cell["warmup_s"] + whole.cell["floor_s"] == pytest.approx(39.9)
    cut = load("--trace", path, "--trace-block", "16", "--minutes", "4.5")
    # Nine launches of 30 s, of which 2 + 1 + 8 s are outside the cell.
    assert cut.cell["warmup_s"] + cut.cell["floor_s"] == pytest.approx(19)
    assert cut.rates == [pytest.approx(10, rel=0.01)]
    assert "over 18.9 s" in cut.notes[0]
    fast = load("--trace", path, "--trace-block", "16", "--blocks", "3", "--trace-speed", "2")
    assert fast.rates == [pytest.approx(20, rel=0.01)]


def test_launches_send_the_same_trace_with_other_tokens(tmp_path: Path) -> None:
    of = load("--trace", str(write_trace(tmp_path / "t.jsonl")), "--trace-block", "16")
    one, other, again = (recorded(of, tmp_path, stream) for stream in ("a", "b", "a"))
    bodies = [[json.loads(r.body) for r in source.requests] for source in (one, other, again)]
    assert bodies[0] == bodies[2]
    prompts = [[body["prompt"] for body in of] for of in bodies]
    assert [len(p) for p in prompts[0]] == [len(p) for p in prompts[1]] == [40] * one.count
    assert [b["max_tokens"] for b in bodies[0][:3]] == [2, 3, 1]
    assert all(10 <= token < 1000 for prompt in prompts[0] for token in prompt)
    # Only the first block of 16 tokens is shared, and only within a launch.
    first = [tuple(prompt[:16]) for prompt in prompts[0]]
    assert first[0] == first[2]
    assert prompts[0][0][16:] != prompts[0][2][16:]
    assert not {*first} & {tuple(prompt[:16]) for prompt in prompts[1]}
    assert of.traffic is not None
    assert of.traffic["repeated_share"] == pytest.approx(16 / 40 / 2, abs=0.01)


def test_prompts_are_sent_once_in_their_order(tmp_path: Path) -> None:
    path = write_prompts(tmp_path / "p.jsonl", 60)
    of = load("--prompts", str(path), "--rate", "5", "--max-tokens", "7")
    assert of.cell["warmup_s"] + of.cell["cap_s"] == 12, "60 prompts at 5 a second"
    source = recorded(of, tmp_path, "a", SERVED | {"vocab_size": None})
    bodies = [json.loads(r.body) for r in source.requests]
    assert [body["prompt"] for body in bodies] == [f"Say {k} in words." for k in range(60)]
    assert {body["max_tokens"] for body in bodies} == {7}
    assert "ignore_eos" not in bodies[0]


def test_messages_use_the_chat_endpoint(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    message = {"messages": [{"role": "user", "content": "Hello"}]}
    path.write_bytes(msgspec.json.encode(message) + b"\n")
    options = parse(["--baseline", "a {port}", "--candidate", "b {port}", "--rate", "1",
                     "--prompts", str(path)])  # fmt: skip
    assert options.chat


def test_error_for_a_short_file_gives_the_required_number_of_requests(tmp_path: Path) -> None:
    trace = str(write_trace(tmp_path / "t.jsonl", 30))
    with pytest.raises(LoadError, match=f"found 14 requests .* at least {FEWEST}"):
        load("--trace", trace, "--trace-block", "16")
    prompts = str(write_prompts(tmp_path / "p.jsonl", 20))
    with pytest.raises(LoadError, match="found 20 prompts; allowed: at least 23"):
        load("--prompts", prompts, "--rate", "2")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--trace", "t.jsonl", "--rate", "2"], "--rate: a trace sets the times"),
        (["--trace", "t.jsonl"], "--trace: t.jsonl:1: hash_ids has 3 ids"),
        (["--trace", "absent"], "--trace: [Errno 2]"),
        (["--trace", "pipe"], "--trace: found 'pipe', which is no regular file; allowed: a file"),
        (["--prompts", "deep.jsonl", "--rate", "2"], "--prompts: deep.jsonl:1: "),
        (["--prompts", "p.jsonl"], "--rate: found none; allowed"),
        (["--prompts", "t.jsonl", "--rate", "2"], "--prompts: "),
        (["--prompts", "p.jsonl", "--rate", "2", "--rate", "4"], "--rate: found several with"),
        (["--prompts", "p.jsonl", "--rate", "2", "--trace-speed", "2"], "effect without --trace"),
        (["--shape", "8x8", "--rate", "2", "--max-tokens", "9"], "no effect without --prompts"),
        (["--shape", "8x8", "--trace", "t.jsonl"], "not allowed with argument --shape"),
    ],
)  # fmt: skip
def test_contradictory_traffic_options_are_refused(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_trace(Path("t.jsonl"))
    write_prompts(Path("p.jsonl"), 60)
    os.mkfifo("pipe")
    deep = "[" * 100_000 + "]" * 100_000
    Path("deep.jsonl").write_text(f'{{"messages": [{{"role": "user", "content": {deep}}}]}}\n')
    with pytest.raises(SystemExit) as ended:
        load(*arguments)
    assert ended.value.code == 64
    message = capsys.readouterr().err
    assert words in message
    assert len(message.splitlines()) == 1


def test_burst_at_the_end_of_a_trace_does_not_count_as_saturation() -> None:
    burst = np.array([200.0] * 90 + [5000.0] * 10)
    behind = np.linspace(200, 6000, 100)
    assert effective_rps(burst, 10, TENTH) < 0.95 * 10
    assert effective_rps(burst, 10, HALF) == 10
    assert effective_rps(behind, 10, HALF) < 0.95 * 10


def test_prompts_to_running_servers_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(write_prompts(tmp_path / "p.jsonl", 60))
    with pytest.raises(SystemExit):
        parse(["--baseline-url", "http://127.0.0.1:1", "--candidate-url", "http://127.0.0.1:2",
               "--rate", "2", "--prompts", path])  # fmt: skip
    assert "--prompts: found with a URL" in capsys.readouterr().err


def test_cells_are_long_enough_for_the_judged_percentile() -> None:
    shape = ["--shape", "8x8", "--rate", "0.5"]
    assert load(*shape).cell["floor_s"] == 60
    p90 = load(*shape, "--metric", "ttft_p90")
    assert p90.cell["floor_s"] == 100, "50 requests"
    assert p90.cell["min_completed"] == 50
