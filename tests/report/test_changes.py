"""Test the report's section on what else each connector of a vLLM study changes."""

import copy
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from connector_tax.figures.tables import StudyTables
from connector_tax.files import read_json, write_json
from connector_tax.report.changes import Changes, changes_of, transfers_of
from connector_tax.report.page import render
from connector_tax.settings import table
from connector_tax.settings.matrix import plain_of, shipped
from connector_tax.settings.request import multi
from tests.analysis.tables import edit_csv
from tests.figures.figure_study import write_study
from tests.figures.figure_tables import Design
from tests.report.test_report import Page, write_pictures

ENGINE = {
    "kind": "vllm", "label": "real vLLM, GPU", "device": "cuda", "python": "env/bin/python",
    "model": "openai/gpt-oss-20b", "served_model_name": "m", "vocab_size": 1000, "flags": {},
    "environment": {}, "forms": {},
}  # fmt: skip
CLASSES = {"mooncake_both": "MooncakeConnector", "nixl_both": "NixlConnector",
           "lmcache_only": "LMCacheConnectorV1"}  # fmt: skip
# Settings that a probe records: of each server, and of NIXL's.
RECORDED = {"hybrid_kv_cache_manager": "true", "kv_cache_layout": "LBNHC",
            "cudagraph_mode": "FULL_AND_PIECEWISE", "max_model_len": "1000", "kv_tokens": "4000",
            "kv_blocks": "250"}  # fmt: skip
OF_NIXL = {"kv_cache_layout": "LBHNC", "kv_tokens": "3000", "kv_blocks": "200"}
SERVE = "vllm serve M --port {port}"
OPTION = "--kv-transfer-config"
NIXL = '{"kv_connector":"NixlConnector","kv_role":"kv_both"}'


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a study in which LMCache was left out by pre-flight, so that it recorded nothing."""
    labels = {name: name for name in ("plain", "noop_connector", *CLASSES)}
    root = tmp_path_factory.mktemp("changes") / "s"
    write_study(root, Design(labels=labels, skipped={"lmcache_only": "not there"}, inputs=(512,)))
    document: Any = read_json(root / "study.json")
    for entry in document["configurations"]:
        entry["connector"] = CLASSES.get(entry["id"], entry["connector"])
        if entry["id"] == "noop_connector":
            entry |= {"connector": "NoOpConnector", "module_path": "own.module"}
    write_json(root / "study.json", document)
    edit_csv(root / "analysis" / "engine.csv", _record)
    return root


def _record(rows: list[dict[str, str]]) -> None:
    """Replace the rows of engine.csv; Mooncake's servers recorded only the layout."""
    blank = dict.fromkeys(rows[0], "")
    rows.clear()
    for config in ("plain", "noop_connector", "mooncake_both", "nixl_both"):
        own = RECORDED | (OF_NIXL if config == "nixl_both" else {})
        own = {"kv_cache_layout": "LBNHC"} if config == "mooncake_both" else own
        rows += [blank | {"config": config, "setting": name, "value": value}
                 for name, value in own.items()]  # fmt: skip
    rows.append(blank | {"config": "lmcache_only", "reason": "not there"})
    differing = {"config": "nixl_both", "plain": "uni", "differs": "true"}
    rows.append(blank | differing | {"setting": "executor", "value": "mp"})
    rows.append(blank | differing | {"setting": "kv_cache_layout", "value": "LBHNC"})


def _study(
    written: Path, folder: Path, version: str = "0.32.0", **engine: Any
) -> tuple[StudyTables, Changes]:
    root = shutil.copytree(written, folder / "s")
    document: Any = read_json(root / "study.json")
    document["config"]["engine"] = ENGINE | engine
    write_json(root / "study.json", document)
    write_json(root / "environment.json", {"vllm": version, "cpu": "synthetic"})
    study = StudyTables(root / "study.json")
    changes = changes_of(study)
    assert changes is not None
    return study, changes


def _cells(changes: Changes) -> dict[str, dict[str, str]]:
    """Return the cells by configuration and column."""
    headings = [heading for heading, _ in changes.table.columns]
    return {
        row.cells[0].text: {name: cell.text for name, cell in zip(headings, row.cells, strict=True)}
        for row in changes.table.rows
    }


def _matrix_row(model: str, connector: str) -> list[str]:
    """Return start, requests at once, manager, layout and graphs of the matrix, each marked."""
    matrix = shipped()
    (row,) = (r for r in matrix["rows"] if (r["model"], r["connector"]) == (model, connector))
    names = table.columns(matrix, model)[1:]
    shown = dict(zip(names, (cell.text for cell in table.cells(matrix, row)), strict=True))
    length = plain_of(matrix, model)["capacity"][0]["length"]
    kept = ("starts", f"requests of {length:,}", "hybrid manager", "layout", "graphs")
    return [f"{shown[name]}*" for name in kept]


def test_recorded_values_are_preferred_and_the_matrix_fills_the_gaps(
    written: Path, tmp_path: Path
) -> None:
    _, changes = _study(written, tmp_path)
    cells = _cells(changes)
    assert [*cells["plain"].values()] == [
        "plain", "yes", "4.00", "on", "LBNHC", "FULL_AND_PIECEWISE", "–",
    ]  # fmt: skip
    assert [*cells["nixl_both"].values()][1:] == [
        "yes", "3.00 (−25%)", "on", "LBHNC", "FULL_AND_PIECEWISE", "NixlConnector",
    ]  # fmt: skip
    mooncake = [*cells["mooncake_both"].values()][1:6]
    own = _matrix_row("gpt-oss-20b", "MooncakeConnector")
    assert own[3] == "LBHNC*"
    assert mooncake == ["yes", "same*", own[2], "LBNHC", own[4]]
    assert [*cells["lmcache_only"].values()][1:] == [
        "yes*", "3.33 (−44%)*", "off*", "LBNHC*", "FULL_AND_PIECEWISE*", "LMCacheConnectorV1",
    ]  # fmt: skip
    assert changes.others == {"nixl_both": "executor mp (plain uni)"}
    (note,) = changes.notes
    assert note.startswith("* Not recorded by this study, but resolved without a server by ")
    assert "vLLM 0.32.0, NVIDIA H200 (not there; --gpu h200), 20 GiB of KV cache" in note
    assert note.endswith("; gpt-oss-20b; 131,072 tokens.")


def test_refusal_of_a_connector_that_was_not_started_is_shown_with_its_reason(
    written: Path, tmp_path: Path
) -> None:
    _, changes = _study(written, tmp_path, model="Qwen/Qwen3-Next-80B-A3B-Instruct")
    assert _cells(changes)["lmcache_only"]["Starts"] == "refuses*"
    reason = "lmcache_only: vLLM refuses: Failed to promote local KV cache specs to one unified"
    assert any(note.startswith(reason) for note in changes.notes)


@pytest.mark.parametrize(
    ("changed", "python", "model"),
    [
        ({"version": "0.26.0"}, "--python PYTHON (with vLLM 0.26.0) ", "gpt-oss-20b"),
        ({"version": "0.32.0+cpu", "model": "me/Mine"}, "", "me/Mine"),
    ],
)
def test_study_that_the_matrix_lacks_names_the_command_that_resolves_it(
    written: Path, tmp_path: Path, changed: Mapping[str, str], python: str, model: str
) -> None:
    _, changes = _study(written, tmp_path, **changed)
    assert [*_cells(changes)["lmcache_only"].values()][1:6] == ["not recorded"] * 5
    assert _cells(changes)["mooncake_both"]["Layout"] == "LBNHC"
    assert changes.notes == [
        "Neither recorded nor in the shipped matrix: mooncake_both, lmcache_only. To resolve:"
        f" connector-tax settings {python}--model {model} --connector MooncakeConnector"
        " --connector LMCacheConnectorV1"
    ]


def test_model_of_a_shipped_architecture_has_the_rows_of_a_model_in_the_matrix(
    written: Path, tmp_path: Path
) -> None:
    name = "./build/models/Qwen3-Coder-30B-A3B-Instruct"
    _, changes = _study(written, tmp_path, model=name)
    own = _matrix_row("Qwen3-30B-A3B", "LMCacheConnectorV1")
    assert [*_cells(changes)["lmcache_only"].values()][1:6] == [own[0], "same*", *own[2:]]
    shape = "Qwen3-30B-A3B, of the same architecture as Qwen3-Coder-30B-A3B-Instruct; 40,960 tokens"
    assert shape in changes.notes[0]


def test_configuration_of_another_interpreter_is_not_in_the_matrix(
    written: Path, tmp_path: Path
) -> None:
    forms = {"lmcache_only": {"python": "other/bin/python"}}
    _, changes = _study(written, tmp_path, forms=forms)
    assert _cells(changes)["lmcache_only"]["Starts"] == "not recorded"
    assert _cells(changes)["mooncake_both"]["Starts"] == "yes"


def test_study_without_a_gpu_names_the_command_that_resolves_a_gpus_values(
    written: Path, tmp_path: Path
) -> None:
    _, on_gpu = _study(written, tmp_path / "gpu")
    _, changes = _study(written, tmp_path / "cpu", device="cpu", model="./build/models/Qwen3-8B")
    assert len(changes.notes) == len(on_gpu.notes) + 1
    assert changes.notes[-1] == (
        "These servers ran without a GPU. On a GPU, layout, graphs and the number of requests can"
        " differ. To resolve: connector-tax settings --model Qwen3-8B"
    )


def test_report_has_the_section_only_for_a_vllm_with_a_connector(
    written: Path, tmp_path: Path
) -> None:
    study, _ = _study(written, tmp_path)
    write_pictures(study.root)
    source = render(study)
    text = Page(source).text
    assert 'href="#changes"' in source
    assert source.count('id="changes"') == 1
    assert "What else each connector changes" in text
    assert "3.33 (−44%)*" in text
    embedded, bare = copy.deepcopy(study.document), copy.deepcopy(study.document)
    embedded["config"]["engine"]["kind"] = "embedded"
    for entry in bare["configurations"]:
        entry["connector"] = None
    for document in (embedded, bare):
        write_json(study.root / "study.json", document)
        other = StudyTables(study.root / "study.json")
        assert changes_of(other) is None
        assert "What else each connector changes" not in render(other)


# ---- comparisons of commands


@pytest.mark.parametrize(
    ("line", "connector"),
    [
        (SERVE, None),
        (f"{SERVE} {OPTION} {NIXL}", "NixlConnector"),
        (f"{SERVE} {OPTION} '{NIXL}'", "NixlConnector"),
        (f"{SERVE} {OPTION.replace('-t', '_t')}={NIXL}", "NixlConnector"),
        (f"{SERVE} {OPTION} {json.dumps(multi('A', 'B')['transfer'])}", "MultiConnector"),
    ],
)
def test_connector_of_a_command_is_read_from_its_words(
    written: Path, tmp_path: Path, line: str, connector: str | None
) -> None:
    known = _transfers(written, tmp_path, line)["nixl_both"]
    assert (known and known["kv_connector"]) == connector


@pytest.mark.parametrize(
    "line",
    [
        "http://127.0.0.1:8000",
        f"{SERVE} {OPTION}",
        f"{SERVE} {OPTION} [",
        f"{SERVE} {OPTION}.kv_connector NixlConnector",
        f"bash -c 'vllm serve M {OPTION} $CONFIG'",
        f"{SERVE} 'open",
    ],
)
def test_connector_of_a_command_that_cannot_be_read_is_unknown(
    written: Path, tmp_path: Path, line: str
) -> None:
    assert "nixl_both" not in _transfers(written, tmp_path, line)


def _transfers(written: Path, folder: Path, line: str) -> dict[str, Any]:
    study = StudyTables(shutil.copytree(written, folder / "s") / "study.json")
    commands = {"plain": SERVE, "nixl_both": line}
    study.settings["engine"].update({"kind": "command", "commands": commands})
    return transfers_of(study)


def test_comparison_of_commands_fills_gaps_unless_the_baseline_has_a_connector(
    written: Path, tmp_path: Path
) -> None:
    names = ("plain", "noop_connector", *CLASSES)
    commands = dict.fromkeys(names, SERVE) | {
        "lmcache_only": f'{SERVE} {OPTION} {{"kv_connector":"LMCacheConnectorV1"}}'
    }
    served = {"model": "openai/gpt-oss-20b", "vocab_size": None, "max_model_len": 2000}
    section: Any = {"kind": "command", "served": served, "commands": commands}
    study, changes = _study(written, tmp_path, **section)
    assert _cells(changes)["lmcache_only"]["Hybrid manager"] == "off*"
    # Servers without a probe have the longest request from /v1/models.
    edit_csv(study.root / "analysis" / "engine.csv", lambda rows: rows.remove(
        next(r for r in rows if (r["config"], r["setting"]) == ("plain", "max_model_len"))
    ))  # fmt: skip
    again = changes_of(StudyTables(study.root / "study.json"))
    assert again is not None
    assert _cells(again)["plain"]["Requests at once"] == "2.00"
    document: Any = read_json(study.root / "study.json")
    document["config"]["engine"]["commands"]["plain"] = f"{SERVE} {OPTION} {NIXL}"
    write_json(study.root / "study.json", document)
    against_nixl = changes_of(StudyTables(study.root / "study.json"))
    assert against_nixl is not None
    assert _cells(against_nixl)["lmcache_only"]["Hybrid manager"] == "not recorded"
