"""Test `connector-tax settings` with recorded answers of inside/resolve.py."""

import copy
import csv
import io
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from connector_tax.__main__ import main as connector_tax
from connector_tax.config import ROOT
from connector_tax.settings import request, table
from connector_tax.settings.__main__ import main
from connector_tax.settings.matrix import (
    Matrix,
    connectors_of,
    differs,
    models_of,
    plain_of,
    rows_of,
    state_of,
    status_of,
)
from connector_tax.settings.run import UnresolvedError
from tests.shared import interpreter
from tests.workflow.harness import wait_for

FOLDER = Path(__file__).parent
# Three models and four connectors on vLLM 0.32.0, as the program sent them.
MESSAGES = [json.loads(line) for line in (FOLDER / "messages.jsonl").read_text().splitlines()]
CELLS = [message for message in MESSAGES if message["kind"] == "cell"]
# Answers for one model, without `determine_available_memory` in the executor's stand-in.
BROKEN = [json.loads(line) for line in (FOLDER / "broken_stub.jsonl").read_text().splitlines()]
MATRIX: Matrix = json.loads((ROOT / "docs/results/records/settings.json").read_text())
TINY = ["--model", "tiny-qwen3"]


def _replayed(folder: Path, messages: list[dict[str, Any]]) -> str:
    """Return a stand-in for vLLM's interpreter that gives these answers to every request."""
    lines = folder / "answers.jsonl"
    lines.write_text("".join(json.dumps(message) + "\n" for message in messages))
    return str(interpreter(folder, f'cat {lines} > "/proc/self/fd/$3"'))


def _row(matrix: Matrix, model: str, connector: str) -> Any:
    rows = matrix["rows"]
    return next(r for r in rows if (r["model"], r["connector"]) == (model, connector))


# ---- the comparison


def test_shipped_matrix_resolves_every_model_with_every_connector() -> None:
    models = models_of(MATRIX)
    assert models == [*request.MODELS]
    names = [connector["name"] for connector in MATRIX["connectors"]]
    assert [(r["model"], r["connector"]) for r in MATRIX["rows"]] == [
        (model, name) for model in models for name in names
    ]
    assert {row["state"] for row in MATRIX["rows"]} == {"resolves", "refuses"}
    assert status_of(MATRIX) == 1


@pytest.mark.parametrize(
    ("model", "connector", "blocks", "requests"),
    [
        ("Qwen3-8B", "plain", 9102, 3.555),
        ("Qwen3-8B", "LMCacheConnectorV1", 9102, 3.555),
        ("gpt-oss-20b", "NixlConnector", 54613, 5.92),
        ("gpt-oss-20b", "LMCacheConnectorV1", 27306, 3.333),
        ("gemma-3-12b-it", "OffloadingConnector", 20480, 1.502),
        ("Qwen3-Next-80B-A3B-Instruct", "MooncakeStoreConnector", 1606, 3.291),
        ("granite-4.0-h-tiny", "LMCacheMPConnector", 6553, 18.459),
        ("Nemotron-H-8B-Base-8K", "NixlConnector", 1260, 48.462),
    ],
)
def test_capacity_equals_the_number_that_vllm_reports(
    model: str, connector: str, blocks: int, requests: float
) -> None:
    capacity = _row(MATRIX, model, connector)["capacity"][0]
    assert (capacity["blocks"], capacity["requests"]) == (blocks, requests)


def test_disabled_hybrid_manager_halves_the_capacity_of_a_window_model_and_rejects_mamba() -> None:
    half = _row(MATRIX, "gpt-oss-20b", "LMCacheConnectorV1")
    assert half["settings"]["hybrid_manager"] is False
    assert differs(half, plain_of(MATRIX, "gpt-oss-20b"))
    plain = plain_of(MATRIX, "gpt-oss-20b")
    assert not differs({**plain, "connector": "Mine", "settings": {}}, plain)
    for model in request.MODELS[5:]:
        refused = _row(MATRIX, model, "LMCacheConnectorV1")
        assert refused["state"] == "refuses"
        assert refused["reason"].startswith("Failed to promote local KV cache specs")


def test_one_unsupported_child_switches_the_hybrid_manager_off() -> None:
    both = _row(MATRIX, "gpt-oss-20b", "Multi(NixlConnector, OffloadingConnector)")
    one = _row(MATRIX, "gpt-oss-20b", "Multi(NixlConnector, LMCacheConnectorV1)")
    assert "hybrid_manager" not in both["settings"]
    assert one["settings"]["hybrid_manager"] is False


def _cell(**changes: Any) -> dict[str, Any]:
    """Return the record of a refusal, with changes to its error."""
    cell = next(m for m in CELLS if "error" in m and m["case"] == "LMCacheConnectorV1")
    copied: dict[str, Any] = copy.deepcopy(cell)
    copied["error"] |= changes
    return copied


@pytest.mark.parametrize(
    "changes",
    [
        *({"type": t} for t in ("AttributeError", "ImportError", "ModuleNotFoundError")),
        {"type": "TypeError"},
        {"causes": ["ImportError"]},
        {"frames": ["vllm/v1/core/kv_cache_utils.py:1", "resolve.py:7"]},
        {"frames": ["vllm/config/vllm.py:1", "vllm/model_executor/models/gpt_oss.py:7"]},
        {"frames": []},
    ],
)
def test_programming_error_is_reported_as_not_resolved_not_as_refusal(
    changes: dict[str, Any],
) -> None:
    assert state_of(_cell(), "resolves") == "refuses"
    assert state_of(_cell(**changes), "resolves") == "not resolved"


def test_error_does_not_count_as_refusal_without_a_resolved_plain() -> None:
    assert state_of(_cell(), "not resolved") == "not resolved"
    assert state_of(_cell(), None) == "not resolved"
    assert state_of({"died": "signal 9"}, "resolves") == "not resolved"


def test_error_raised_inside_a_checked_configuration_class_is_a_refusal() -> None:
    frames = ["vllm/engine/arg_utils.py:9", "pydantic/_internal/_dataclasses.py:121"]
    assert state_of(_cell(type="ValidationError", frames=frames), "resolves") == "refuses"


# ---- the command


def _answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(arguments)
    shown = capsys.readouterr()
    return status, shown.out, shown.err


def test_json_csv_markdown_and_text_have_the_same_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = ["--python", _replayed(tmp_path, MESSAGES), *TINY]
    page = tmp_path / "page.md"
    status, out, err = _answer(capsys, *python, "--json", "--export-markdown", str(page))
    assert status == 1
    assert "resolved in" in err
    matrix: Matrix = json.loads(out)
    assert matrix["rows"] == list(rows_of(CELLS))
    assert page.read_text() == table.as_markdown(matrix)
    _, out, _ = _answer(capsys, *python, "--csv")
    lines = list(csv.DictReader(io.StringIO(out)))
    assert [(line["model"], line["connector"]) for line in lines if line["length"] != "8192"
            and line["length"] != "32768"] == [(c["model"], c["case"]) for c in CELLS]  # fmt: skip
    _, out, _ = _answer(capsys, *python)
    for row in matrix["rows"]:
        assert any(line.startswith(f"{row['connector']}  ") for line in out.splitlines())
    assert "3.33 (−44%)" in out


@pytest.mark.parametrize(("connectors", "status"), [(("plain",), 0), (("plain", "Nixl"), 1)])
def test_exit_status_reports_if_a_connector_changes_something(
    tmp_path: Path, connectors: tuple[str, ...], status: int
) -> None:
    kept = [m for m in MESSAGES if m["kind"] != "cell" or m["case"].startswith(connectors)]
    assert main(["--python", _replayed(tmp_path, kept), *TINY]) == status


def test_ctrl_c_ends_the_command_and_its_program_in_silence(tmp_path: Path) -> None:
    answers = tmp_path / "answers.jsonl"
    answers.write_text("".join(json.dumps(message) + "\n" for message in MESSAGES[:3]))
    pid = tmp_path / "pid"
    waits = f'echo $$ > {pid}.new; cat {answers} > "/proc/self/fd/$3"; sleep 1; mv {pid}.new {pid}'
    python = interpreter(tmp_path, f"{waits}; exec sleep 300")
    command = [sys.executable, "-m", "connector_tax", "settings", "--python", str(python), *TINY]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for(pid.exists, running)
    running.send_signal(signal.SIGINT)
    assert running.communicate(timeout=30) == (b"", b"")
    assert running.returncode == 128 + signal.SIGINT
    assert not Path("/proc", pid.read_text().strip()).exists()


def test_broken_stub_exits_with_3_and_is_not_resolved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = _answer(capsys, "--python", _replayed(tmp_path, BROKEN), *TINY)
    assert status == 3
    assert "not resolved: ContractError: Executor.determine_available_memory" in out
    assert "refuses:" not in out


def test_model_whose_plain_is_not_resolved_has_one_line_and_no_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = next(cell for cell in CELLS if cell["case"] == "plain")
    error = _cell()["error"] | {"text": "Model architectures ['NoSuch'] are not supported"}
    cell = {**plain, "settings": {}, "capacity": [], "error": error}
    messages = [*MESSAGES[:2], cell, {"kind": "end"}]
    status, out, _ = _answer(capsys, "--python", _replayed(tmp_path, messages), *TINY)
    assert status == 3
    lines = [line for line in out.splitlines() if cell["model"] in line]
    assert len(lines) == 1
    assert "plain: not resolved: Model architectures ['NoSuch'] are not supported" in lines[0]
    assert "hybrid manager" not in out


def test_missing_names_are_reported_with_the_version(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = MESSAGES[0] | {"version": "9.9.9"}
    missing = {"kind": "missing", "names": ["vllm.config.CompilationMode.NONE"]}
    status, _, err = _answer(capsys, "--python", _replayed(tmp_path, [head, missing]), *TINY)
    assert status == 3
    assert "vLLM 9.9.9 lacks what this command uses: vllm.config.CompilationMode.NONE" in err


def test_untried_version_and_cpu_platform_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = MESSAGES[0] | {"version": "9.9.9", "platform": "cpu", "device": "cpu"}
    _, out, _ = _answer(capsys, "--python", _replayed(tmp_path, [head, *MESSAGES[1:]]), *TINY)
    assert out.startswith("the CPU platform: block sizes and numbers of blocks differ from a GPU")
    assert "this project has not tried the whole matrix on vLLM 9.9.9; the proof passed" in out
    tried = MESSAGES[0] | {"version": "0.33.0+cpu"}
    _, out, _ = _answer(capsys, "--python", _replayed(tmp_path, [tried, *MESSAGES[1:]]), *TINY)
    assert "has not tried" not in out


def test_program_that_ends_early_is_reported_with_its_last_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = interpreter(tmp_path, "echo no module named vllm >&2; exit 1")
    status, out, err = _answer(capsys, "--python", str(python), *TINY)
    assert (status, out) == (3, "")
    assert "ended with status 1" in err
    assert "no module named vllm" in err
    status, _, err = _answer(capsys, "--python", str(tmp_path / "none"), *TINY)
    assert status == 3
    assert "does not run" in err
    python = interpreter(tmp_path, "kill -9 $$")
    _, _, err = _answer(capsys, "--python", str(python), *TINY)
    said = f"connector-tax settings: {python}: ended with signal 9 before its last answer\n"
    assert err == said
    _, _, err = _answer(capsys, "--python", sys.executable, *TINY)
    assert "has no vLLM, or not all of it: ModuleNotFoundError: No module named 'torch'" in err
    failed = {"kind": "failed", "type": "ValueError", "text": "x", "frames": ["resolve.py:1"]}
    failing = _replayed(tmp_path, [MESSAGES[0], failed])
    assert "ValueError: x (resolve.py:1)" in _answer(capsys, "--python", failing, *TINY)[2]


def test_answer_that_is_cut_off_exits_with_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = _replayed(tmp_path, MESSAGES)
    answers = tmp_path / "answers.jsonl"
    answers.write_text(answers.read_text()[:-400])
    status, out, err = _answer(capsys, "--python", python, *TINY)
    assert (status, out) == (3, "")
    assert "ended with status 0 before its last answer\n" in err


@pytest.mark.parametrize("width", [60, 80, 120])
def test_narrow_terminal_shows_what_differs_from_plain_as_a_list(width: int) -> None:
    shown = table.as_text(MATRIX, width)
    begin = shown.index("\ngpt-oss-20b, ")
    lines = shown[begin : shown.index("\n  HiSparseConnector: ", begin)].splitlines()[2:]
    assert max(map(len, lines)) <= width
    words = " ".join(map(str.strip, lines))
    assert words.startswith("plain starts: yes; requests of 131,072: 5.92; requests of 8,192: 53.2")
    assert "SimpleCPUOffloadConnector, LMCacheMPConnector, MooncakeStoreConnector package" in words
    assert "HF3FSKVConnector requests of 131,072: 3.33 (−44%); " in words
    assert "blocks: 27,306; hybrid manager: off; groups: 1" in words
    assert "; package, started: no hf3fs_fuse, never" in words
    wide = table.as_text(MATRIX, 200)
    assert "connector  " in wide
    assert "  also" not in wide  # no row has a value there


@pytest.mark.parametrize(
    ("connector", "packages", "started", "cell", "missing"),
    [
        ("NixlConnector", {"nixl": True}, True, "there, yes", ""),
        ("NixlConnector", {"nixl": False}, True, "no nixl, yes", "nixl"),
        ("OffloadingConnector", {}, True, "there, yes", ""),
        ("HiSparseConnector", {}, False, "there, never", ""),
        ("MoRIIOConnector", {"mori": False}, False, "no mori, never", "mori"),
        ("Both", {"a": False, "b": False}, False, "no a, b, never", "a b"),
        ("NixlConnector", None, True, "not recorded, yes", "not recorded"),
        ("NixlConnector", {"nixl": True}, None, "there, not recorded", ""),
        ("NixlConnector", None, None, "not recorded", "not recorded"),
    ],
)
def test_column_says_whether_a_connector_has_its_package_and_was_ever_started(
    connector: str,
    packages: dict[str, bool] | None,
    started: bool | None,
    cell: str,
    missing: str,
) -> None:
    plain = plain_of(MATRIX, "gpt-oss-20b")
    known: Any = {"name": connector, "transfer": request.transfer(connector)}
    known |= {} if packages is None else {"packages": packages}
    known |= {} if started is None else {"started": started}
    row = copy.deepcopy(plain) | {"connector": connector, "settings": {}}
    matrix: Any = {**MATRIX, "connectors": [MATRIX["connectors"][0], known], "rows": [plain, row]}
    heading, of_plain, of_row = table.as_text(matrix, None).splitlines()[3:6]
    assert heading.endswith("  package, started")
    assert of_plain.endswith("  –")
    assert of_row.endswith(f"  {cell}")
    assert table.as_markdown(matrix).count(f"| {cell} |") == 1
    first, *_, last = csv.DictReader(io.StringIO(table.as_csv(matrix)))
    assert (first["missing_packages"], first["started"]) == ("", "")
    assert last["missing_packages"] == missing
    assert last["started"] == ("not recorded" if started is None else str(started))


def test_shipped_records_tell_the_package_and_the_start_of_every_connector() -> None:
    shown = table.as_text(MATRIX, None)
    assert "not recorded" not in shown
    column = {line.split("  ")[0]: line.rsplit("  ", 1)[-1] for line in shown.splitlines()}
    assert column["LMCacheConnectorV1"] == "there, yes"
    assert column["Multi(NixlConnector, LMCacheConnectorV1)"] == "there, never"
    assert column["FlexKVConnectorV1"] == "no flexkv, never"
    never = {c["name"] for c in MATRIX["connectors"] if c["transfer"] and not c["started"]}
    assert {name for name, cell in column.items() if cell.endswith(", never")} == never


def test_difference_in_layers_alone_is_shown() -> None:
    plain, nixl = copy.deepcopy([c for c in CELLS if c["model"] == CELLS[0]["model"]][:2])
    nixl["settings"] = plain["settings"] | {"specs": {"FullAttentionSpec, block 16": 24}}
    rows = [*rows_of([plain, nixl])]
    known = connectors_of([request.plain(), request.connector("NixlConnector")], {"nixl": False})
    matrix: Matrix = {**MATRIX, "connectors": known, "rows": rows}
    assert status_of(matrix) == 1
    also = "specs 24 × (FullAttentionSpec, block 16)"
    assert also in table.as_text(matrix, None)
    assert also in table.as_markdown(matrix)
    first, *_, last = csv.DictReader(io.StringIO(table.as_csv(matrix)))
    assert (first["also"], first["missing_packages"], first["started"]) == ("", "", "")
    assert (last["also"], last["missing_packages"], last["started"]) == (also, "nixl", "True")


def test_bar_in_a_name_adds_no_markdown_column() -> None:
    name = '{"kv_connector": "a|b"}'
    rows = [row | {"connector": name.join(row["connector"].split("NixlConnector"))}
            for row in rows_of(CELLS)]  # fmt: skip
    matrix: Matrix = {**MATRIX, "rows": rows, "connectors": []}
    lines = [line for line in table.as_markdown(matrix).splitlines() if line.startswith("| ")]
    assert any("a\\|b" in line for line in lines)
    assert not any("a|b" in line for line in lines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "b200"], "invalid choice: 'b200'"),
        (["--gpu", "h100", "--python", "python3"], "not allowed with"),
        (["--kv-gib", "0"], "allowed: a number above 0"),
        (["--kv-gib", "nan"], "allowed: a number above 0"),
        (["--tp", "0"], "allowed: a whole number of at least 1"),
        (["--max-model-len", "8k"], "allowed: a whole number of at least 1"),
        (["--connector", "MultiConnector"], "name them in --kv-transfer-config"),
        (["--connector", "A", "--connector", "A"], "found 'A' twice"),
        (["--kv-transfer-config", "{"], "is not JSON"),
        (["--kv-transfer-config", "[]"], "no key kv_connector"),
        (
            ["--kv-transfer-config", '{"kv_connector": "A", "kv_connector_extra_config": []}'],
            "kv_connector_extra_config, or a child in it, is not a connector's configuration",
        ),
        (
            [
                "--kv-transfer-config",
                '{"kv_connector": "A", "kv_connector_extra_config": {"connectors": ["B"]}}',
            ],
            "kv_connector_extra_config, or a child in it, is not a connector's configuration",
        ),
        (["--kv-transfer-config", "[" * 100_000], "is not JSON"),
        (
            ["--kv-transfer-config", '{"kv_connector": "A", "kv_connector": "B"}'],
            "found key 'kv_connector' twice",
        ),
        (
            [
                *("--kv-transfer-config", '{"kv_connector": "A"}'),
                *("--kv-transfer-config", '{"kv_connector":  "A"}'),
            ],
            '--kv-transfer-config: found \'{"kv_connector": "A"}\' twice; allowed: each name once',
        ),
        (["--python", ""], "--python: found ''; allowed: a Python that has vLLM"),
        (["--model", "x" * 300], "File name too long"),
        (["--kv-gib", "1e6"], "allowed: a number above 0, below 1e6"),
        (["--export-markdown", "/"], "--export-markdown: found '/'; allowed: a file in an"),
        (["--json", "--csv"], "not allowed with"),
        (["--", "--tensor-parallel-size=2"], "this is set by --tp"),
        (["--", "--trust-remote-code"], "no code of a model is run"),
        (["--model", "no/such/model"], "allowed: a folder, OWNER/NAME, or DeepSeek-V2-Lite, "),
        (["--model", "/no/model"], "allowed: a folder, OWNER/NAME, or DeepSeek-V2-Lite, "),
        (["--model", "Qwen3-8B", "--model", "Qwen3-8B"], "'Qwen3-8B' is the name of two models"),
        (["--unknown"], "unrecognized arguments: --unknown"),
    ],
)
def test_bad_arguments_exit_with_64(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    words = [] if "--python" in arguments or "--gpu" in arguments else ["--python", "python3"]
    with pytest.raises(SystemExit) as stopped:
        main([*words, *arguments])
    assert stopped.value.code == 64
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert message in lines[0]


def test_older_vllm_is_resolved_without_connectors_that_it_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = "SimpleCPUOffloadConnector"
    second = copy.deepcopy(MESSAGES[1])
    second["registered"] = [name for name in second["registered"] if name != gone]
    second["cases"] = [case for case in second["cases"] if case["registered"] != gone]
    kept = [m for m in MESSAGES[2:] if m.get("case") != gone]
    python = _replayed(tmp_path, [MESSAGES[0], second, *kept])
    status, out, _ = _answer(capsys, "--python", python, *TINY)
    assert status == 1
    assert gone not in out


def test_row_that_fails_only_at_a_shorter_length_is_not_resolved() -> None:
    plain, nixl = copy.deepcopy([c for c in CELLS if c["model"] == CELLS[0]["model"]][:2])
    entry = nixl["capacity"][-1]
    for lost, reason in (
        ({"died": "signal 9"}, "the process ended with signal 9"),
        ({"error": _cell(type="AttributeError")["error"]}, "AttributeError"),
    ):
        nixl["capacity"][-1] = {"length": entry["length"], **lost}
        row = [*rows_of([plain, nixl])][1]
        assert row["state"] == "not resolved"
        assert row["reason"].startswith(reason)
    # Also if vLLM refuses the model's own length.
    refused = {"capacity": [*nixl["capacity"][:1], {"length": 1, "died": "signal 9"}]}
    row = [*rows_of([plain, nixl | refused | {"error": _cell()["error"]}])][1]
    assert (row["state"], row["reason"]) == ("not resolved", "the process ended with signal 9")
    # vLLM itself refuses the length.
    nixl["capacity"][-1] = {"length": entry["length"], "error": _cell()["error"]}
    assert [*rows_of([plain, nixl])][1]["state"] == "resolves"


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--connector", "NoConnector"], "NoConnector"),
        (["--connector", ""], ""),
        (["--kv-transfer-config", '{"kv_connector": ""}'], ""),
        (
            ["--kv-transfer-config", json.dumps(request.multi("NixlConnector", "Nxl")["transfer"])],
            "Nxl",
        ),
    ],
)
def test_connector_that_vllm_does_not_register_exits_with_64(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], name: str
) -> None:
    python = _replayed(tmp_path, MESSAGES)
    with pytest.raises(SystemExit) as stopped:
        main(["--python", python, *arguments, *TINY])
    assert stopped.value.code == 64
    assert f"{name!r}: not registered by vLLM 0.32.0; allowed: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "config.json: not found"), ("{", "config.json"), ("[]", "no key architectures"),
     ('{"model_type": "qwen3"}', "no key architectures"),
     ('{"architectures": []}', "architectures: found []; allowed: a list of names"),
     ('{"architectures": "Qwen3"}', "architectures: found 'Qwen3'; allowed: a list of names"),
     ('{"architectures": [[1]]}', "architectures: found [[1]]; allowed: a list of names")],
)  # fmt: skip
def test_broken_config_exits_with_64_and_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, message: str
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    if content is not None:
        (folder / "config.json").write_text(content)
    with pytest.raises(SystemExit) as stopped:
        main(["--python", "python3", "--model", str(folder)])
    assert stopped.value.code == 64
    err = capsys.readouterr().err.strip()
    assert message in err
    assert len(err.splitlines()) == 1


def test_missing_environment_is_named_with_its_build_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("connector_tax.settings.__main__.ROOT", tmp_path)
    monkeypatch.setattr("sys.argv", ["connector-tax"])
    assert connector_tax(["settings"]) == 3
    assert "make vllm-settings" in capsys.readouterr().err


# ---- requests


def test_given_configuration_names_its_connector_and_its_children() -> None:
    text = json.dumps(request.multi("NixlConnector", "LMCacheConnectorV1")["transfer"])
    case = request.given(text)
    assert case["registered"] == "MultiConnector"
    assert request.connectors_in(case["transfer"]) == ["NixlConnector", "LMCacheConnectorV1"]
    own = request.given('{"kv_connector": "Mine",\n "kv_connector_module_path": "mine"}')
    assert own["registered"] is None
    assert "\n" not in own["name"]  # the row's name
    extra = {"connectors": [own["transfer"], case["transfer"]]}
    both = request.transfer("MultiConnector", **extra)
    names = ["MultiConnector", "MultiConnector", "NixlConnector", "LMCacheConnectorV1"]
    assert [*request.registered_in(both)] == names


def test_connector_row_names_its_package_and_whether_it_was_started() -> None:
    cases = [request.connector("NixlConnector"), request.connector("FlexKVConnectorV1")]
    nixl, flexkv = connectors_of(cases, {"nixl": True, "flexkv": False})
    assert nixl["packages"] == {"nixl": True}
    assert nixl["started"]
    assert flexkv["packages"] == {"flexkv": False}
    assert not flexkv["started"]
    others = [request.layerwise(), request.multi("NixlConnector", "OffloadingConnector")]
    assert not any(
        entry["started"] for entry in connectors_of(others, {"lmcache": True, "nixl": True})
    )


def test_absent_connector_has_no_row() -> None:
    with pytest.raises(UnresolvedError, match="NixlConnector: not registered"):
        list(rows_of([{"kind": "cell", "model": "x", "case": "NixlConnector", "absent": True}]))
