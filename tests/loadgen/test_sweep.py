"""Test several rates in one command, and a run's outputs: page, table, records."""

import csv
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from connector_tax.artifacts.saturation import effective_rps
from connector_tax.loadgen.__main__ import main
from connector_tax.loadgen.arguments import parse_arguments, shown_command
from connector_tax.loadgen.charts import Axis
from connector_tax.loadgen.sweep import (
    NOT_JUDGED,
    highest_unsaturated,
    powers_of_two,
    verdict,
)
from tests.engine.serving import launched
from tests.loadgen.fault_server import HEAD, Pause, chunked, good_events, serve

ANSWER = [HEAD, *(part for e in good_events() for part in (chunked(e, last=False), Pause(0.01)))]


def test_a_sweep_stops_after_the_first_saturated_rate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # One sequence at a time, 60 ms each: about 16 requests/s.
    slow = {"scheduler": {"max_num_seqs": 1}, "step_cost": {"beta0_us": 20_000.0}}
    names = ("summary.json", "out.jsonl", "page.html", "table.csv")
    summary, output, page, table = (tmp_path / name for name in names)
    with launched(tmp_path, changes=slow) as server:
        status = main(
            [
                *("--url", f"http://127.0.0.1:{server.port}", "--no-affinity"),
                *("--prompt-tokens", "8", "--max-tokens", "3", "--ignore-eos", "--seed", "3"),
                *("--sweep", "4:256", "--duration", "1", "--summary", str(summary)),
                *("--output", str(output), "--html", str(page), "--csv", str(table)),
            ]
        )
    assert status in (0, 1), "1: the machine was too busy to keep the timing"
    whole = json.loads(summary.read_text())
    rates = [run["configuration"]["rate"] for run in whole["rates"]]
    assert rates == [4.0 * 2**k for k in range(len(rates))]
    assert max(rates) < 256
    saturated = [run["saturation"]["saturated"] for run in whole["rates"]]
    assert saturated == [False] * (len(rates) - 1) + [True]
    knee = whole["highest_unsaturated_rps"]
    assert knee == (rates[-2] if len(rates) > 1 else None)
    records = [json.loads(line) for line in output.read_text().splitlines()]
    counts = {rate: sum(r["rate"] == rate for r in records) for rate in rates}
    assert counts == {rate: rate for rate in rates}
    assert {row["load"] for row in csv.DictReader(table.open())} == {f"rate {r}" for r in rates}
    assert whole["verdict"] in page.read_text()
    printed = capsys.readouterr().out
    assert whole["verdict"] in printed
    assert max(map(len, printed.splitlines()[: len(rates) + 1])) <= 80


def test_interrupted_rate_is_not_judged() -> None:
    summaries = [
        {"configuration": {"rate": rate}, "saturation": saturation}
        for rate, saturation in ((2.0, {"saturated": False}), (4.0, NOT_JUDGED))
    ]
    assert highest_unsaturated(summaries) == 2.0
    expected = "2 requests/s are sustained; 4 was interrupted, so it is not judged"
    assert verdict(summaries) == expected


def test_sweep_that_ended_early_claims_nothing_about_higher_rates() -> None:
    rates = [2.0, 4.0]
    configuration = {"rate": 2.0, "rates": rates}
    summaries = [{"configuration": configuration, "saturation": {"saturated": False}}]
    expected = "2 requests/s are sustained; higher rates were not measured"
    assert verdict(summaries) == expected
    rates.pop()
    assert "the server's limit is above it" in verdict(summaries)


def test_body_is_shown_without_its_secrets() -> None:
    body = '{"top_p": 1, "extra": [{"api_key": "sk-abcdefghijklmnop0123"}]}'
    shown = shown_command(["--url", "http://x", "--body", body])
    assert "abcdefghijklmnop" not in shown
    assert '{"top_p": 1, "extra": [{"api_key": "(not shown)"}]}' in shown
    assert '{"top_p":1}' in shown_command(["--body", '{"top_p":1}'])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--sweep 8:1", "allowed: LOWEST:HIGHEST"),
        ("--sweep 0:4", "allowed: LOWEST:HIGHEST"),
        ("--sweep many", "allowed: LOWEST:HIGHEST"),
        ("--rate 4 --rate 4", "allowed: different rates"),
        ("--rate 4 --rate inf", "none of them inf"),
        ("--rate 4 --sweep 1:2", "not allowed with argument"),
        ("--sweep 1:4 --prompts x.jsonl", "--prompts is not valid with several rates"),
        ("--sweep 1:4 --session-output x.jsonl", "--session-output is not valid"),
    ],
)
def test_invalid_list_of_rates_is_refused(
    options: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = options.split()
    prompt = [] if "--prompts" in words else ["--prompt-words", "3"]
    with pytest.raises(SystemExit) as ended:
        parse_arguments(["--url", "http://x", *prompt, *words])
    assert ended.value.code == 2
    assert named in capsys.readouterr().err


def test_rates_are_run_in_ascending_order() -> None:
    options = parse_arguments(
        ["--url", "http://x", "--prompt", "p", "--rate", "8", "--rate", "2", "--rate", "4"]
    )
    assert options.rates == [2, 4, 8]
    assert powers_of_two(1.5, 12) == [1.5, 3, 6, 12]


def test_a_growing_backlog_lowers_the_effective_throughput() -> None:
    steady, growing = np.full(100, 50.0), np.linspace(0, 10_000, 100)
    assert effective_rps(steady, 10.0) == 10.0
    assert effective_rps(growing, 10.0) == pytest.approx(100 / 19, rel=0.05)
    assert effective_rps(np.empty(0), 10.0) == 0.0


def test_html_page_is_self_contained_and_shows_the_command_without_secrets(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    with serve(*ANSWER, b"0\r\n\r\n") as server:
        main(
            [
                *("--url", f"http://127.0.0.1:{server.port}/v1?key=secret1", "--no-affinity"),
                *("--header", "X-Key: secret2", "--header=X-Other: secret3", "--model", "<m>"),
                *("--prompt", "p & q", "--rate", "30", "--duration", "1", "--html", str(page)),
            ]
        )
    text = page.read_text()
    assert "secret" not in text
    assert "--header &#x27;X-Key: ...&#x27;" in text
    assert "&lt;m&gt;" in text
    assert not re.findall(r"(?:src|href|@import|url\()", text)
    drawings = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.S)]
    labels = [drawing.get("aria-label") for drawing in drawings]
    assert labels == ["TTFT over time.", "TPOT over time.", "Distribution."]
    assert len(drawings[0].findall("circle")) == 30
    assert "schedule_lag_p99_ms" in text


def test_command_is_shown_quoted_for_a_shell() -> None:
    words = ["--url", "http://x/v1?k=s", "--prompt", "it's", "--header", "A: b", "--header=C: d"]
    assert shown_command(words) == (
        "connector-tax loadgen --url 'http://x/v1?...' --prompt 'it'\"'\"'s' "
        "--header 'A: ...' '--header=C: ...'"
    )


def test_records_contain_latencies_and_stamps(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with serve(*ANSWER, b"0\r\n\r\n") as server:
        url = f"http://127.0.0.1:{server.port}"
        words = f"--url {url} --no-affinity --prompt p --concurrency 1 --requests 3"
        main([*words.split(), "--output", str(output)])
    for record in map(json.loads, output.read_text().splitlines()):
        due_ns = record["t_intended_ns"]
        assert record["ttft_ms"] == (record["t_first_token_ns"] - due_ns) / 1e6
        assert record["e2e_ms"] == (record["t_last_token_ns"] - due_ns) / 1e6
        assert 5 < record["tpot_ms"] < record["e2e_ms"]
        assert record["rate"] is None


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("values", [[5.0], [1.0, 3.0], [0.02, 7.0, 4000.0], [30.0, 31.0]])
def test_axis_contains_its_values_and_at_most_eight_ticks(values: list[float], log: bool) -> None:
    axis = Axis.over(values, 10, 110, log)
    places = [axis.at(value) for value in values]
    assert places == sorted(places)
    assert all(10 <= place <= 110 for place in places)
    ticks = axis.ticks()
    assert 1 <= len(ticks) <= 8
    assert all(10 <= axis.at(tick) <= 110 for tick in ticks)


@pytest.mark.parametrize(("low", "high"), [(8, 16), (2.8, 3.5), (1, 32)])
def test_a_logarithmic_axis_has_several_ticks_however_short_it_is(low: float, high: float) -> None:
    assert len(Axis(low, high, 0, 100, log=True).ticks()) >= 3
