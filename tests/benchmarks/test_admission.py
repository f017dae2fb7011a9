"""Test the admission benchmark: latencies of known streams, and agreement with its source."""

from collections import Counter

import pytest

from benchmarks.admission import Stream, measured, prompts, summarize


def test_prompts_equal_those_of_the_source_article() -> None:
    made = prompts()
    assert Counter(map(len, made)) == {515: 32, 4: 96}
    assert len({tuple(prompt[:3]) for prompt in made}) == 128


def test_summary_of_known_streams_has_the_exact_latencies() -> None:
    # Sent 1 ms apart; first token after 10 ms, then one every 2 ms.
    sent = [i * 1_000_000 for i in range(128)]
    streams = [Stream(t, [t + 10_000_000 + k * 2_000_000 for k in range(32)]) for t in sent]
    for name, value in summarize(streams).items():
        known = {"TTFT": 10, "TPOT": 2, "ITL": 2, "latency": 72, "tokens/s": 128 * 32 / 0.199}
        assert value == pytest.approx(known[name.split()[0]])


@pytest.mark.long
def test_packing_lowers_the_ttft_tail_as_in_the_source_article() -> None:
    figures = measured()
    fifo, pack = figures["fifo"], figures["pack"]
    assert -0.55 < pack["TTFT 99"] / fifo["TTFT 99"] - 1 < -0.25
    assert 0 < pack["TPOT 50"] / fifo["TPOT 50"] - 1 < 0.2
    assert pack["tokens/s"] > 0.98 * fifo["tokens/s"]
