"""Test a comparison's page: the words that differ, the load, milliseconds."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from connector_tax.ab.arguments import parse
from connector_tax.ab.design import arguments_of
from connector_tax.artifacts.tables import POOLED, TAX
from connector_tax.figures.compared import (
    command_to_repeat,
    commands,
    label_of,
    latencies,
    load,
    markdown,
    marked_words,
)
from connector_tax.figures.names import draw
from connector_tax.figures.tables import StudyTables
from connector_tax.files import read_json, write_json
from connector_tax.report.page import shown_sections, without_absent_marks
from connector_tax.servers.command import split_command
from tests.figures.figure_study import write_study
from tests.figures.figure_tables import Design
from tests.shared import known

SERVE = "vllm serve M --port {port}"
NIXL = ' --kv-transfer-config {"kv_connector":"NixlConnector","kv_role":"kv_both"}'


@pytest.mark.parametrize(
    ("baseline", "candidate", "label"),
    [
        (SERVE, SERVE + NIXL, "--kv-transfer-config NixlConnector"),
        (SERVE + " --max-num-seqs 8", SERVE + " --max-num-seqs 64", "--max-num-seqs 64"),
        (SERVE + " --swap --seed=1", SERVE + " --swap --seed=2", "--seed=2"),
        (
            SERVE,
            SERVE + ' --kv-transfer-config={"kv_connector":"X","kv_port":"a=b"}',
            "--kv-transfer-config=X",
        ),
        (SERVE + " --enforce-eager", SERVE, "without --enforce-eager"),
        (SERVE, SERVE, "the same again"),
        ("old/bin/" + SERVE, "new/bin/" + SERVE, "new/bin/vllm"),
    ],
)
def test_candidate_is_named_by_the_words_that_differ(
    baseline: str, candidate: str, label: str
) -> None:
    assert label_of(split_command(baseline), split_command(candidate)) == label


def test_long_name_of_a_candidate_is_truncated() -> None:
    assert len(label_of(["serve"], ["serve", "--option", "x" * 100])) == 40
    nested = "[" * 100_000  # too deep for a JSON parser
    assert label_of(["serve"], ["serve", nested]) == f"{nested[:39]}…"


def test_words_are_marked_if_they_differ_at_the_same_place() -> None:
    marked = marked_words(["a", "--x", "1", "--y", "1"], ["a", "--x", "1", "--y", "2"])
    assert marked == [("a", False), ("--x", False), ("1", False), ("--y", False), ("1", True)]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> StudyTables:
    root = tmp_path_factory.mktemp("compared")
    write_study(root, Design())
    document: Any = read_json(root / "study.json")
    ids = [entry["id"] for entry in document["configurations"]]
    document["config"]["engine"]["commands"] = {
        name: SERVE + (NIXL if name == "nixl_both" else "") for name in ids
    }
    write_json(root / "study.json", document)
    return StudyTables(root / "study.json")


def test_page_lists_commands_load_and_machine(study: StudyTables) -> None:
    words_by_label = dict(commands(study))
    assert [word for word, other in words_by_label["NIXL both"] if other] == NIXL.split()
    assert not any(other for _, other in words_by_label["plain"])
    words = dict(load(study))
    assert "requests/s of" in words["load"]
    assert words["measured"].endswith("requests")


@pytest.mark.parametrize(
    "line",
    [
        ["--baseline", "A=1 serve --port {port} 'a b'", "--candidate", "serve x {port}", "--rate",
         "20", "--rate", "0.5", "--shape", "64x8", "--beside", "cache {port}", "--env", "X=a b",
         "--margin", "2.5%", "--blocks", "4", "--shared-machine", "--pythonpath", "FOLDER"],
        ["--baseline-url", "http://127.0.0.1:1/v1", "--candidate-url", "new=http://127.0.0.1:2",
         "--concurrency", "4", "--shape", "64x8", "--goodput", "ttft:200,tpot:20.5", "--metric",
         "ttft_p90", "--minutes", "7", "--seed", "3", "--model", "m"],
        ["--baseline", "s {port}", "--candidate", "new=t {port}", "--trace", "FOLDER/trace",
         "--trace-speed", "2", "--trace-block", "16"],
    ],
)  # fmt: skip
def test_command_to_repeat_has_the_same_arguments(line: list[str], tmp_path: Path) -> None:
    trace = {"timestamp": 0, "input_length": 8, "output_length": 2, "hash_ids": [1]}
    (tmp_path / "trace").write_text(json.dumps(trace) + "\n")
    given = [word.replace("FOLDER", str(tmp_path)) for word in line]
    arguments = json.loads(json.dumps(arguments_of(parse(given))))
    again = shlex.split(command_to_repeat(arguments))
    assert again[:2] == ["connector-tax", "ab"]
    assert json.loads(json.dumps(arguments_of(parse(again[2:])))) == arguments


def test_milliseconds_equal_the_tables(study: StudyTables) -> None:
    found = [one for one in latencies(study) if one.config == "nixl_both"]
    assert found[0].metric == "ttft_p50"
    for one in found:
        (row,) = (r for r in study.of(TAX, "A") if (r.config, r.metric, r.rate_rps)
                  == (one.config, one.metric, one.rate_rps))  # fmt: skip
        assert one.difference == row.difference
        (pooled,) = (r for r in study.cell_rows if (r.config, r.cell, r.phase, r.block)
                     == ("plain", row.cell, "A", POOLED))  # fmt: skip
        assert one.base[0] == pooled.number(f"{one.metric}_ms")


def test_baseline_keeps_its_milliseconds_where_a_candidate_has_no_valid_cell(
    tmp_path: Path,
) -> None:
    void = {("nixl_both", "A", "r4"): "errors"}
    study = StudyTables(write_study(tmp_path, Design(void=void)))
    rows = {(one.config, one.rate_rps, one.metric): one for one in latencies(study)}
    row = rows["nixl_both", 4.0, "ttft_p50"]
    (pooled,) = (of for of in study.pooled if (of.config, of.cell) == ("plain", "r4"))
    ends = tuple(known(pooled.number(f"ttft_p50{end}_ms")) for end in ("", "_lo", "_hi"))
    assert row.base == ends
    assert row.own == row.difference == (None, None, None)


def test_markdown_lists_commands_and_every_latency(study: StudyTables) -> None:
    page = markdown(study, ["NIXL both: costs"])
    assert "- NIXL both: costs" in page
    assert "**--kv-transfer-config**" in page
    assert page.count("\n| ") == len(latencies(study)) + 2
    assert known(latencies(study)[0].own[0]) > 0


def test_caption_leaves_out_marks_that_the_figure_lacks() -> None:
    words = "Taxes. An open triangle marks a tax; its interval is. Open diamonds are the prior."
    assert without_absent_marks(words, marked=False) == "Taxes."
    marked = "Taxes. An open triangle marks a tax; its interval is."
    assert without_absent_marks(words, marked=True) == marked


def test_forest_plot_shows_the_judged_metrics_over_all_rates(study: StudyTables) -> None:
    def titles() -> list[str]:
        axes = draw(study, "fig9_forest").figure.axes
        return [one.get_title(place) for one in axes for place in ("left", "center")]

    assert [*filter(None, titles())] == ["TTFT p50", "TPOT p50"]
    statistics: Any = study.settings["statistics"]
    statistics["judged"] = ["e2e_p90"]
    assert [*filter(None, titles())] == ["E2E p90"]
    del statistics["judged"]


def test_load_of_a_trace_names_its_file_and_repeated_share(study: StudyTables) -> None:
    sweep: Any = study.settings["phase_a"]
    sweep["traffic"] = {
        "kind": "trace", "source": "t.jsonl", "sha256": "ab12", "requests": 7, "speed": 2.0,
        "repeated_share": 0.29,
    }  # fmt: skip
    conditions = dict(load(study))
    del sweep["traffic"]
    assert "of the trace t.jsonl at speed 2, on average" in conditions["load"]
    assert "29% of the prompt tokens repeated" in conditions["load"]
    assert conditions["t.jsonl"] == "the first 7 requests, sha256 ab12"


def test_page_of_a_comparison_has_no_section_without_content(study: StudyTables) -> None:
    rates = study.settings["phase_a"]["rates_rps"]
    assert len(rates) > 1
    shown = shown_sections(study, steps_known=True, changes_known=True)
    assert "hypotheses" not in shown
    assert "changes" in shown
    assert {"saturation", "steps"} <= {*shown}
    study.settings["phase_a"]["rates_rps"] = rates[:1]
    shown = shown_sections(study, steps_known=False, changes_known=False)
    assert not {"saturation", "steps", "changes"} & {*shown}
    study.settings["phase_a"]["rates_rps"] = rates
