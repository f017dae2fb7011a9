"""Test failed and skipped launches.

A failed plain ends the run at once, others end it after the last launch. A rerun completes it.
"""

import json
import sys
from pathlib import Path

import pytest

from connector_tax.artifacts import paths
from connector_tax.artifacts.index import CellEntry, launch_index, write_index
from connector_tax.artifacts.names import Launch
from connector_tax.files import read_json, write_json
from connector_tax.study import complete, launch, remeasure
from tests.study.driving import arguments, launch_folder, write_study


@pytest.fixture
def study_file(tmp_path: Path) -> Path:
    return write_study(tmp_path / "results" / "tiny", [{"kind": "refuse_start"}])


def test_a_failed_plain_ends_the_run(study_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(arguments(study_file)) == 1
    output = "".join(capsys.readouterr())
    assert "plain/block0/A failed, and every tax is a comparison with plain" in output
    assert "it resumes at this launch" in output
    folder = launch_folder(study_file)
    assert not (folder / "index.json").exists()
    assert read_json(folder / "index.failed.json")["status"] == "failed"


def test_launch_fails_if_the_servers_log_shows_a_dead_connector(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study_file = write_study(tmp_path / "results" / "tiny")
    log = "echo Creating v1 connector with name: X; echo Failed to connect to master"
    serve = f"exec {sys.executable} -m connector_tax.engine --port {{port}}"
    study = read_json(study_file)
    study["config"]["engine"] = {
        **{"kind": "command", "label": "server by its command", "device": "cpu"},
        "served": {"model": "embedded-model", "vocab_size": 32000, "no_steps": "no probe"},
        "commands": {"plain": f"bash -c '{log}; {serve}'"},
    }
    study_file.write_text(json.dumps(study))
    assert launch.main(arguments(study_file)) == 1
    assert "its log says: Failed to connect to master" in "".join(capsys.readouterr())


def test_phase_with_the_same_rate_as_another_is_skipped_with_one_line(
    study_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = read_json(study_file)
    names = ("noop_connector", "plain", "plain_2")
    study["run_order"]["Bp"] = [{"config": name, "block": 0} for name in names]
    write_json(study_file, study)
    gates = read_json(study_file.parent / paths.PREFLIGHT_STATUS)
    gates["noop_connector"] = {"include": False, "reason": "its gate", "evidence": None}
    write_json(study_file.parent / paths.PREFLIGHT_STATUS, gates)
    rates = {"ref_safe": 20.0, "ref_load": 20.0, "rates_rps": [20.0], "fallback_used": False}
    rates |= {"saturation_rate_rps": {}, "criteria": {}, "left_out": {}}
    write_json(study_file.parent / paths.REFERENCE_RATES, rates)
    for name in names:
        assert launch.main(arguments(study_file, name, "Bp")) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "skipped" in line]
    reason = "ref_load equals ref_safe (20 req/s)"
    assert [line.partition("of 3  ")[2] for line in lines] == [
        "noop_connector  skipped: pre-flight: its gate",
        f"plain  the whole phase is skipped: {reason}",
    ]
    # The log and the index of each launch hold the reason.
    log = (study_file.parent / "logs" / "plain_2.block0.Bp.log").read_text()
    assert log.endswith(f"skipped: {reason}\n")
    index = read_json(study_file.parent / "runs" / "plain_2" / "block0" / "Bp" / "index.json")
    assert (index["status"], index["reason"]) == ("skipped", reason)


@pytest.mark.long
def test_failed_connector_does_not_stop_its_phase_and_is_reported_at_its_end(
    study_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = read_json(study_file)
    study["run_order"]["A"] = [{"config": "noop_connector", "block": 0}]
    study_file.write_text(json.dumps(study))
    assert launch.main(arguments(study_file, "noop_connector")) == 0
    folder = study_file.parent / "runs" / "noop_connector" / "block0" / "A"
    assert read_json(folder / "index.json")["status"] == "failed"

    end = ["--study", str(study_file), "--phase", "A"]
    assert complete.main(end) == 1
    assert f"MISSING {folder}: " in capsys.readouterr().err
    assert not (folder / "index.json").exists()
    del study["config"]["engine"]["definition_content"]["faults"]
    study_file.write_text(json.dumps(study))
    assert launch.main(arguments(study_file, "noop_connector")) == 0
    assert complete.main(end) == 0
    assert not (study_file.parent / "complete.json").exists()


# A machine file: of 100 ms of the server's CPU the study used 70, and the host took 30.
COUNTERS = {"idle_ms": [0, 0], "self_us": 0, "throttled": None}
BEGIN = {"kind": "begin", "loadgen": [0], "server": [1], "t_ns": 0}
CHUNK = {"kind": "chunk", "t_ns": 10**8}
STOLEN = "".join(
    json.dumps({**line, "counters": {**COUNTERS, "own_ms": [own, own], "steal_ms": [0, steal]}})
    + "\n"
    for line, own, steal in ((BEGIN, 0, 0), (CHUNK, 70, 30))
)


def test_void_cells_are_counted_by_cause_with_a_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study_file = write_study(tmp_path / "results" / "tiny")
    study = read_json(study_file)
    study["run_order"] = {
        "A": [{"config": "plain", "block": n} for n in range(5)],
        "B": [],
        "Bp": [],
    }
    study_file.write_text(json.dumps(study))
    early = {"early_send_ms": {"value": 1.0, "bound": 0.0, "pass": False}}
    foreign = {"foreign_cpu_server": {"value": 1.0, "bound": 0.1, "pass": False}}
    half = {"error_rate": {"value": 0.5, "bound": 0.01, "pass": False}}
    unanswered, refused = {"drain_timeout": 20, "http_status": 9}, {"http_status": 20}
    ends = {
        0: (early | foreign | half, "drained", unanswered),
        1: (foreign, "drained", {}),
        2: (early, "overloaded", {}),
        3: (early | half, "drained", unanswered),
        4: (half, "drained", refused),
    }
    for block, (health, ended_by, failed) in ends.items():
        ended = Launch("plain", block, "A")
        for cell in ("r20", "r40"):
            record = {"health": health, "cooldown": {"ended_by": ended_by},
                      "counts": {"failed": failed}}  # fmt: skip
            folder = ended.folder(study_file.parent) / cell
            write_json(folder / f"cell_A_{cell}.json", record)
            if block < 3:
                (folder / f"machine_A_{cell}.jsonl").write_text(STOLEN)
        entries = [CellEntry(cell, "void", "long words " * 40, {}) for cell in ("r20", "r40")]
        index = launch_index(study, ended, entries, started_utc="")
        write_index(ended.folder(study_file.parent), index)
    assert complete.main(["--study", str(study_file), "--phase", "A"]) == 0
    again = f"run connector-tax remeasure {study_file.parent}, then the same command"
    assert capsys.readouterr().err.splitlines() == [
        "VOID 4 cells: machine disturbed: other processes used the server's CPUs. "
        f"stop other programs on the machine; {again}",
        "VOID 4 cells: the server was overloaded. "
        "a retry would overload it again; lower the rates, or set `shape_rates`",
        f"VOID 2 cells: too many requests failed. {again}",
        "In 6 of 10 void cells the host took up to 30% of the CPU time (steal): measure when it is"
        " quieter, or on another machine",
    ]
    looks = study_file.parent / "looks.json"
    write_json(looks, [])
    # By default a launch that would be overloaded again is not remeasured.
    assert remeasure.main([str(study_file.parent)]) == 0
    assert "3 launches moved aside" in capsys.readouterr().out
    assert Launch("plain", 2, "A").folder(study_file.parent).exists()
    # Some launches of Phase A stay, so their interim analyses stay too.
    assert looks.exists()
    overloaded = ["plain/block2/A", "plain/block3/A"]
    assert remeasure.main([str(study_file.parent), "--launch", *overloaded]) == 0
    assert not looks.exists()
    assert looks.with_name("looks.superseded1.json").exists()


@pytest.mark.parametrize("given", ["results/tiny", "../far/results/tiny"])
def test_running_study_is_found_by_any_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: str
) -> None:
    far, checkout = tmp_path / "far" / "results", tmp_path / "checkout"
    write_study(far / "tiny")
    locks = checkout / ".snakemake" / "locks"
    locks.mkdir(parents=True)
    (locks / "0.output.lock").write_text("results/tiny/runs/plain/block0/A/index.json\n")
    (checkout / "results").symlink_to(far)
    monkeypatch.chdir(checkout)
    assert remeasure.main([given]) == 2
    assert f"{given}: a run holds the folder" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    assert remeasure.main(["checkout/results/tiny"]) == 2


def test_escape_sequences_in_the_reason_of_a_failed_launch_are_not_printed(
    study_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = read_json(study_file)
    study["run_order"] = {"A": [{"config": "plain", "block": 0}], "B": [], "Bp": []}
    study_file.write_text(json.dumps(study))
    failed = {"status": "failed", "reason": "\x1b]0;owned\x07no GPU\x1b[2J", "started_utc": ""}
    for command, arguments_of in (
        (complete.main, ["--study", str(study_file), "--phase", "A"]),
        (remeasure.main, [str(study_file.parent)]),
    ):
        launched = Launch("plain", 0, "A")
        index = launch_index(study, launched, [], **failed)
        write_index(launched.folder(study_file.parent), index)
        command(arguments_of)
        output = "".join(capsys.readouterr())
        assert "no GPU\n" in output
        assert "\x1b" not in output
