"""Test that the report is self-contained, escaped, complete, and lists what is missing."""

import base64
import gzip
import itertools
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from connector_tax.analysis.aggregate import write_tables
from connector_tax.artifacts.folder import StudyFolder
from connector_tax.artifacts.index import launch_index
from connector_tax.artifacts.names import Launch
from connector_tax.artifacts.study_records import EIGHT, DesignLabel
from connector_tax.artifacts.tables import table_text
from connector_tax.artifacts.verdicts import CANNOT_TELL, COSTS, COSTS_LESS, GAINS, LESS, TOO_FEW
from connector_tax.figures.names import NAMES
from connector_tax.figures.resources import scores
from connector_tax.figures.tables import StudyTables
from connector_tax.files import ArtifactError, read_json, write_json, write_text
from connector_tax.report import answer
from connector_tax.report.__main__ import main
from connector_tax.report.launches import LaunchReport, overhead
from connector_tax.report.page import render
from tests.analysis.tables import edit_csv, select
from tests.figures.figure_study import write_study
from tests.figures.figure_tables import LABELS, STEP_COST_US, Design
from tests.study_folder import fail_launch, write_virtual_study

HOSTILE = "<script>alert(1)</script>"
SKIPPED = {"nixl_both": "NIXL <b>is</b> not installed"}
VOID = {("lmcache_only", "A", "r8"): "error_rate 0.2 > 0.01"}


class Page(HTMLParser):
    """A parser that collects the tags, the attributes and the text of a page."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.sources: list[str] = []
        self.words: list[str] = []
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            assert not name.startswith("on")
            if name == "href":
                self.links.append(value or "")
            elif name in ("src", "srcset", "data", "action"):
                self.sources.append(value or "")

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())


def write_pictures(root: Path) -> None:
    """Write an empty picture for every figure, since the page only inlines them."""
    for name in NAMES:
        write_text(root / "figures" / f"{name}.svg", '<svg xmlns="http://www.w3.org/2000/svg"/>')


def _study(root: Path, design: Design) -> StudyTables:
    study = StudyTables(write_study(root, design, runs=True))
    write_pictures(root)
    return study


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _study(tmp_path_factory.mktemp("written") / "s", Design()).root


@pytest.fixture
def study(written: Path, tmp_path: Path) -> StudyTables:
    """Return a study that the test may change."""
    return StudyTables(shutil.copytree(written, tmp_path / "s") / "study.json")


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> StudyTables:
    labels = LABELS | {"mooncake_both": HOSTILE}
    design = Design(labels=labels, skipped=SKIPPED, void=VOID)
    return _study(tmp_path_factory.mktemp("report") / "odd name #1", design)


@pytest.fixture(scope="module")
def source(full: StudyTables) -> str:
    return render(full)


@pytest.fixture(scope="module")
def text(source: str) -> str:
    return Page(source).text


@pytest.mark.parametrize(
    "sentence",
    [
        # The top: answer, verdicts, configurations without a verdict, and the engine.
        "Mooncake + LMCache costs most: +",
        "▲ costs +52 %, at most +56 %",
        "NIXL both (skipped: NIXL <b>is</b> not installed)",
        "EMULATED embedded (emulated); 3 blocks. The engine is emulated with costs set in a file",
        # The choices that were fixed beforehand, and the launches that are compared.
        "at ref_safe (4 requests/s), confirmatory",
        "plain 2 times; the order of each is below",
        "Plain's later launch of a block against its earlier one",
        # A criterion that requires a number is `reported`, not `met`.
        "The share of the no-op connector in the taxreportedSentence of criterion 3.",
        "every skip has a reasonnot metSentence of criterion 6.",
        # Rates with the criteria that fired; the prior beside the measured tax.
        "ref_safe 4 requests/s",
        "1× / 1× / 1×",
        "+45.2",
        "+37.4",
        # Resources beside plain.
        "CPU while idle, cores",
        "+0.0300 [+0.0260, +0.0340]",
        "+1,455 [+1,443, +1,467]",
        # Each launch took 104 s for 103 s of cells, start-up and release.
        "Overhead: 1.010 = wall time",
    ],
)
def test_report_contains_each_sentence(text: str, sentence: str) -> None:
    assert sentence in text


def test_report_is_self_contained(source: str) -> None:
    page = Page(source)
    assert {"iframe", "object"}.isdisjoint(page.tags)
    assert len(page.sources) == len(NAMES) - 1  # the scorecard is a table, and a download
    assert all(url.startswith("data:image/svg+xml;base64,") for url in page.sources)
    css = source[source.index("<style>") : source.index("</style>")]
    assert "url(" not in css
    assert "@import" not in css
    assert not re.search(r"https?://", re.sub(r"data:[^\"]*", "", source))


def test_every_report_link_is_an_anchor_or_an_embedded_file(full: StudyTables, source: str) -> None:
    links = Page(source).links
    assert len(links) > 20
    held = []
    for link in links:
        if link.startswith("#"):
            assert f'id="{link[1:]}"' in source
        elif link.startswith("data:application/gzip;base64,"):
            held.append(gzip.decompress(base64.b64decode(link.partition(",")[2])))
        else:
            assert link == "data:," or link.startswith("data:image/svg+xml;base64,")
    tables = [path.read_bytes() for path in (full.root / "analysis").glob("*.csv")]
    assert sorted(held) == sorted(tables)


def test_hostile_text_is_escaped_in_the_report(source: str, text: str) -> None:
    assert HOSTILE not in source
    assert "<b>is</b>" not in source
    assert HOSTILE in text
    assert "NIXL <b>is</b> not installed" in text


def test_headline_has_at_most_25_words_and_the_scorecard_a_row_per_connector(
    full: StudyTables,
) -> None:
    assert len(answer.answer(full).split()) <= 25
    headings, lines = scores(full)
    assert [label for label, _ in lines] == [item.label for item in full.connectors]
    assert {len(cells) for _, cells in lines} == {len(headings)}


def test_five_percent_void_cells_or_more_are_shown_in_red(tmp_path: Path) -> None:
    few = Design(void={("lmcache_only", "A", "r8"): "late"})
    assert 'class="alarm"' not in render(_study(tmp_path / "few", few))
    many = Design(void={("lmcache_only", phase, cell): "late"
                        for phase, cell in itertools.product("AB", ["r1", "r2", "r4", "r8", "r16",
                        "512x64", "512x256", "4096x64"])})  # fmt: skip
    source = render(_study(tmp_path / "many", many))
    assert re.search(r'class="alarm"><strong>\d+ % of the cells are void', source)


def test_tax_that_was_not_prespecified_is_marked_exploratory(source: str) -> None:
    assert "<td>exploratory</td>" in source


def test_report_names_costs_below_the_margin_and_the_blocks_needed_to_decide(
    study: StudyTables,
) -> None:
    def judge(rows: list[dict[str, str]]) -> None:
        for row in select(rows, quantity="tax"):
            if row["config"] == "noop_connector":
                row["verdict"] = LESS if row["metric"] == "ttft_p50" else COSTS_LESS
            if row["config"] == "lmcache_only":
                needed = "12" if row["metric"] == "ttft_p50" else ""
                row |= {"verdict": CANNOT_TELL, "blocks_needed": needed}

    edit_csv(study.root / "analysis" / "effects.csv", judge)
    text = Page(render(study)).text
    assert "; no-op connector costs less than 3%." in text
    assert "● less than 3%" in text
    assert "● costs, less than 3%" in text
    assert "Undecided: LMCache (TTFT p50 12, TPOT p50 over 100). In brackets" in text
    assert "This study has 3, and a block takes" in text


def test_report_names_the_largest_cost_of_each_metric_and_differing_huber_verdicts(
    study: StudyTables,
) -> None:
    def raised(rows: list[dict[str, str]]) -> None:
        for row in select(rows, quantity="tax", cell="all_rates", metric="tpot_p50"):
            row["estimate"] = "0.9" if row["config"] == "nixl_both" else row["estimate"]
            if row["config"] == "noop_connector":
                row |= {"huber_differs": "true"}

    edit_csv(study.root / "analysis" / "effects.csv", raised)
    sentence = answer.answer(study)
    assert re.match(
        r"Mooncake \+ LMCache costs most: .+ on TTFT p50, NIXL both \+90 % on TPOT", sentence
    )
    assert len(sentence.split()) <= 25
    (note,) = (note for note in answer.notes(study) if "Huber" in note)
    assert note.endswith("gives another verdict for no-op connector (TPOT p50).")


def test_margin_control_changes_only_verdicts_that_depend_on_it(
    full: StudyTables, source: str
) -> None:
    moved = re.findall(r"<td[^>]* data-narrow=[^>]*>([^<]*)</td>", source)
    assert len(moved) > 2 * len(full.connectors)
    for verdict in moved:
        assert verdict == CANNOT_TELL or {COSTS, GAINS, "less than 3%"} & {*verdict.split(", ")}
    # On the scorecard, its sign and numbers beside it.
    assert re.search(r"<td[^>]* data-narrow=[^>]*><b>▲ costs</b>", source)


def test_one_block_has_no_verdict_and_no_interval(tmp_path: Path) -> None:
    text = Page(render(_study(tmp_path / "s", Design(blocks=1)))).text
    assert "No verdict." in text
    assert "One block proves nothing, 3 can (a block takes" in text
    assert "Mooncake both +52 % on TTFT p50 and" in text
    assert "point estimates without verdicts" in text
    assert "decode+630+10.5256" in text


@pytest.mark.parametrize(
    ("valid", "sentence"),
    [
        ({}, "2 of 3 blocks are valid, and 3 valid ones can prove a tax (a block"),
        ({"nixl_both": "1"}, "LMCache, 1 for NIXL both, and 3 valid ones can prove a tax (a block"),
    ],
)
def test_report_counts_only_valid_blocks_toward_a_verdict(
    study: StudyTables, valid: dict[str, str], sentence: str
) -> None:
    def lose(rows: list[dict[str, str]]) -> None:
        for row in select(rows, quantity="tax"):
            row |= {"verdict": TOO_FEW, "n_blocks": valid.get(row["config"], "2")}

    edit_csv(study.root / "analysis" / "effects.csv", lose)
    page = render(study)
    assert not re.search(r"<td[^>]* data-narrow=", page)
    text = Page(page).text
    assert sentence in text
    assert "prove nothing" not in text


def test_tax_with_survivorship_is_marked_and_has_no_verdict(tmp_path: Path) -> None:
    marks = {("mooncake_both", "all_rates"): "mooncake_both saturated; plain dropped 65 arrivals"}
    text = Page(render(_study(tmp_path / "s", Design(overloaded=marks)))).text
    reason = "Mooncake both saturated; plain dropped 65 arrivals"
    assert f"No verdict on Mooncake both ({reason})." in text
    assert f"marked ({reason})" in text


def test_report_of_another_connector_omits_hypotheses_it_cannot_answer(
    tmp_path: Path,
) -> None:
    labels = {"plain": "plain", "noop_connector": "no-op connector", "my_connector": "my own"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(STEP_COST_US, "my_connector", 500.0)
        study = _study(tmp_path / "s", Design(labels=labels, inputs=(512,)))
    text = Page(render(study)).text
    assert "my own costs most: +" in text
    assert "Mooncake" not in text
    assert "H1, H2, H3, H4, H5, H6 are about configurations or lengths" in text
    assert "Prior and measured" not in text
    assert "Sentence of criterion 1." not in text
    assert "Sentence of criterion 7." in text


def test_terminal_prints_the_headline_of_the_report(
    full: StudyTables, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer.main(["--study", str(full.root / "study.json")]) == 0
    sentence, *rows, load, _, _, report = capsys.readouterr().out.strip().splitlines()
    assert sentence.removeprefix("embedded (emulated): ") in text
    assert [row[:7] for row in rows[1:]] == [item.label[:7] for item in full.connectors]
    assert report == f"Report: {full.root / 'report.html'}"
    assert load in text


def test_report_shows_load_and_costs_at_the_highest_rate_with_the_pooled_costs(
    full: StudyTables,
) -> None:
    words = answer.load(full)
    rates, judged = full.settings["phase_a"]["rates_rps"], full.judged_rates
    assert words.startswith(f"Over {', '.join(f'{rate:g}' for rate in judged)} requests/s of ")
    # The costs are over the rates at which no server fell behind.
    left_out = [f"{rate:g}" for rate in rates if rate not in judged]
    assert left_out
    assert f"(not {', '.join(left_out)}, where a server fell behind)." in words
    assert re.search(rf"At {max(rates):g}/s plain has TTFT [\d.]+ and TPOT [\d.]+ ms; over", words)
    assert full.connectors[-1].label in words


def test_every_cell_is_listed_with_its_checks(full: StudyTables, source: str, text: str) -> None:
    planned = sum(
        len(order) * len(full.document["cells"][phase])
        for phase, order in full.document["run_order"].items()
    )
    assert f"of {planned} planned" in text
    launched = {path.parents[1] for path in full.root.glob("runs/*/*/*/*/cell_*.json")}
    assert source.count('id="checks-') == len(launched)
    assert source.count("schedule_lag_p99_ms") == len(launched)
    assert "0.2 (0.01) FAILED" in text
    assert "error_rate 0.2 > 0.01" in text
    # A launch's line names its void cell and the reason.
    assert "block 0, LMCache: done: r8 void, error_rate 0.2 > 0.01" in text


def test_launch_without_an_index_is_listed_as_missing(study: StudyTables) -> None:
    (study.root / "runs" / "nixl_both" / "block1" / "A" / "index.json").unlink()
    text = Page(render(study)).text
    assert "7 missing, of" in text
    assert "no index.json" in text


def test_affinity_warnings_are_in_the_report_with_their_number_of_launches(
    study: StudyTables,
) -> None:
    assert "CPUs" not in Page(render(study)).text
    shared = "3 cores: the load generator and its workers share one core"
    paths = sorted(study.root.glob("runs/*/*/*/index.json"))
    for path in paths[:2]:
        index = read_json(path)
        index["attempts"] = [{"load_generator": {"affinity": {"warnings": [shared]}}}, {}]
        write_json(path, index)
    launched = sum(map(len, study.document["run_order"].values()))
    again = StudyTables(study.root / "study.json")
    assert f"{shared} (2 of {launched} launches)" in Page(render(again)).text


def test_overhead_includes_gaps_between_launches_but_no_interruption() -> None:
    label: DesignLabel = {"engine_label": "embedded (emulated)", "design_sha256": "0" * 64}

    def launch(started: str, ended: str | None) -> LaunchReport:
        index = launch_index(
            label, Launch("plain", 0, "A"), [],
            started_utc=f"2026-05-26T{started}+00:00",
            ended_utc=None if ended is None else f"2026-05-26T{ended}+00:00",
            timing={"wall_s": 60.0, "startup_s": 5.0, "cells_s": 50.0, "release_s": 1.0},
        )  # fmt: skip
        return LaunchReport("A", "plain", 0, index, [])

    spent = overhead(
        [
            launch("10:01:02", "10:02:02"),  # two seconds after the first
            launch("10:00:00", "10:01:00"),
            launch("12:00:00", None),  # resumed two hours later; a power cut after the last cell
            launch("12:01:30", "12:02:30"),
            LaunchReport("A", "plain", 0, None, []),
        ]
    )
    assert spent.wall_s == 4 * 60 + 2
    assert spent.ratio == pytest.approx((4 * 60 + 2) / (4 * 56))


def test_missing_figure_is_an_error_that_names_it(study: StudyTables) -> None:
    (study.root / "figures" / "fig6_step_cdf.svg").unlink()
    with pytest.raises(ArtifactError, match=r"fig6_step_cdf\.svg: no such file"):
        render(study)


def test_folder_of_an_earlier_replot_that_cannot_be_deleted_is_named(
    tmp_path: Path, study: StudyTables
) -> None:
    (study.root / "archive.sha256").write_text(f"{'0' * 64}  s.tar.zst 1000000\n")
    tables = study.root / "analysis"
    # Neither root nor another user can delete the target of a link as a folder.
    tables.rename(tmp_path / "elsewhere")
    tables.symlink_to(tmp_path / "elsewhere")
    command = [sys.executable, "-m", "connector_tax.report", "--study"]
    done = subprocess.run(
        [*command, study.root / "study.json"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"report: {tables}: left by an earlier replot, and cannot be")
    assert done.stderr.endswith("; delete it, then rerun the same command\n")


@pytest.mark.parametrize(
    "phase", ["A", *(pytest.param(phase, marks=pytest.mark.workflow) for phase in ("B", "Bp"))]
)
def test_study_with_a_void_phase_has_every_figure_and_a_report(
    tmp_path: Path, phase: str, capsys: pytest.CaptureFixture[str]
) -> None:
    why = "machine disturbed: other processes used the server's CPUs"
    cells = {"A": ["r40", "r80"], "B": ["128x16", "512x16"], "Bp": ["128x16"]}[phase]
    void = {(name, 0, phase, cell): why for name in (*EIGHT, "plain_2") for cell in cells}
    study_file = write_virtual_study(tmp_path / "s", void=void)
    fail_launch(tmp_path / "s/runs/lmcache_only/block0/A", "the server died")
    write_tables(StudyFolder.load(study_file))
    capsys.readouterr()
    assert main(["--study", str(study_file)]) == 0
    page = tmp_path / "s" / "report.html"
    assert capsys.readouterr().out == f"{page}\n"
    source = page.read_text()
    assert source.count("<svg") > 100  # cells over time
    text = Page(source).text
    assert "the server died" in text
    assert f"No cell of Phase {phase} is valid: the study has no numbers for this phase." in text
    assert why in text


def test_settings_that_differ_from_plain_are_listed_once(text: str) -> None:
    # NIXL, too, has another layout, but was skipped.
    assert text.count(f"{HOSTILE}: kv_cache_layout HND (plain NHD)") == 1
    assert "The same in all: block_size 16, attention_backend FLASH_ATTN." in text


def test_report_prints_not_recorded_without_launch_records(study: StudyTables) -> None:
    numbers = ("estimate", "lo", "hi", "base", "own", "setting", "value", "also_differs")

    def forget(rows: list[dict[str, str]]) -> None:
        for row in rows:
            if row.get("quantity", "resource") == "resource":
                row |= dict.fromkeys(row.keys() & set(numbers), "")
                row |= {"reason": "not recorded: too old"}
                row |= {"status": "missing"} if "status" in row else {}

    for name in ("effects", "engine"):
        edit_csv(study.root / "analysis" / f"{name}.csv", forget)
    text = Page(render(study)).text
    assert "Resources: not recorded: too old." in text
    assert "Settings: not recorded: too old." in text


def test_report_lists_steps_and_hooks_by_kind_with_intervals(study: StudyTables) -> None:
    page = Page(render(study)).text
    # 1.5 times the 420 us of mooncake_both, of plain's 6,000, ten times as much in a prefill step.
    assert "Mooncake bothdecode+630 [+570, +700]+10.5256 [196, 326]" in page
    assert "get_finished 168 [151, 185]" in page
    assert "Mooncake bothprefill+6,300 [+6,240, +6,370]+105.0" in page
    assert "get_finished 1,680 [1,512, 1,848]" in page
    assert "plain again (A/A)decode+12 [−8, +32]" in page
    assert re.search(r"get_finished(itself)?(worker)?168 \[151, 185\]1,680 \[1,512, 1,848\]", page)


def test_without_step_timing_the_report_has_no_step_numbers(tmp_path: Path) -> None:
    study = _study(tmp_path / "s", Design(step_timing=False))
    page = Page(render(study)).text
    assert "No step timing" in page
    assert "Hooks at ref_safe" not in page


def test_report_explains_step_spans_at_the_table_and_under_the_figures(
    tmp_path: Path,
) -> None:
    root = _study(tmp_path / "s", Design(blocks=1)).root
    document = read_json(root / "study.json")
    document["config"]["engine"] = {"kind": "vllm", "label": "vLLM", "device": "cuda"}
    write_json(root / "study.json", document)
    row = {"config": "plain", "setting": "async_scheduling", "value": "true"}
    text = table_text("engine.csv", [row])
    write_text(root / "analysis" / "engine.csv", text)
    page = render(StudyTables(root / "study.json"))
    sentence = "Scheduling was asynchronous"
    steps = page[page.index("Engine steps at ref_safe") : page.index("Hooks at ref_safe")]
    assert sentence in steps
    captions = re.findall(r"<figcaption>.*?</figcaption>", page)
    titles = [re.findall(r"Figure \d+", text)[0] for text in captions if sentence in text]
    assert titles == ["Figure 7", "Figure 6"]
