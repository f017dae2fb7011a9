"""The admission study: its figures from known streams, and the whole of it against the source."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.admission import Stream, prompts, replayed, summarize, table
from tests.engine.serving import EMBEDDED


def test_the_prompts_are_the_sources() -> None:
    made = prompts()
    assert Counter(map(len, made)) == {515: 32, 4: 96}
    assert sum(map(len, made)) == 16864
    assert len({tuple(prompt[:3]) for prompt in made}) == 128


def test_figures_of_known_streams() -> None:
    # Sent 1 ms apart; first token after 10 ms, then one every 2 ms.
    streams = [
        Stream(
            i * 1_000_000,
            i * 1_000_000 + 50_000,
            [i * 1_000_000 + 10_000_000 + k * 2_000_000 for k in range(32)],
        )
        for i in range(128)
    ]
    summary = summarize(streams)
    assert summary["ttft_ms"] == pytest.approx([10, 10, 10])
    assert summary["tpot_ms"] == summary["itl_ms"] == pytest.approx([2, 2, 2])
    assert summary["latency_ms"] == pytest.approx([72, 72, 72])
    assert summary["throughput_tokens_s"] == pytest.approx(128 * 32 / 0.199)
    assert summary["add_request_ms"] == pytest.approx([0.05] * 3)
    assert summary["submit_wall_ms"] == pytest.approx(127.05)
    measured = {"fifo": summary, "pack": {**summary, "ttft_ms": [5, 5, 5]}}
    text = table(measured, {"fifo": {**summary, "add_request_ms": None}, "pack": summary})
    assert "fitted to the source" in text.lower()
    line = next(line for line in text.splitlines() if line.startswith("TTFT p99"))
    shown = "TTFT p99 ms 10.0 5.0 -50.0% 10.0 10.0 +0.0% 1144.5 689.7 -39.7%"
    assert line.split() == shown.split()


def test_the_replay_has_what_it_was_fitted_to_and_foretells_the_rest_of_the_source() -> None:
    fifo, pack = replayed("fifo"), replayed("pack")
    fitted = [fifo["ttft_ms"][0], fifo["ttft_ms"][2], fifo["itl_ms"][0], pack["ttft_ms"][0]]
    assert fitted == pytest.approx([672.29, 1144.49, 152.93, 216.77], rel=0.002)
    # Nothing below was fitted.
    assert pack["ttft_ms"][1:] == pytest.approx([611.07, 689.69], rel=0.02)
    assert pack["itl_ms"] == pytest.approx([155.06, 190.19, 221.63], rel=0.02)
    assert fifo["itl_ms"][1:] == pytest.approx([160.77, 189.82], rel=0.07)
    assert pack["tpot_ms"] == pytest.approx([156.40, 158.05, 158.17], rel=0.02)
    assert fifo["throughput_tokens_s"] == pytest.approx(751.55, rel=0.03)
    assert pack["throughput_tokens_s"] == pytest.approx(763.48, rel=0.03)


@pytest.mark.long
def test_pack_does_to_the_tail_what_the_source_says(tmp_path: Path) -> None:
    arguments = ("--config", str(EMBEDDED), "--output", str(tmp_path))
    module = "benchmarks.admission"
    subprocess.run([sys.executable, "-m", module, *arguments], timeout=200, check=True)
    measured = json.loads((tmp_path / "admission.json").read_text())["measured"]
    fifo, pack = measured["fifo"], measured["pack"]
    assert -0.55 < pack["ttft_ms"][2] / fifo["ttft_ms"][2] - 1 < -0.25
    assert 0 < pack["tpot_ms"][0] / fifo["tpot_ms"][0] - 1 < 0.2
    assert pack["throughput_tokens_s"] > 0.98 * fifo["throughput_tokens_s"]
