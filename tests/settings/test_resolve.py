"""Test inside/resolve.py with stand-ins for vLLM: errors, processes, platform."""

import os
import signal
import sys
from importlib import util
from pathlib import Path
from typing import Any

import pytest

from connector_tax.settings.__main__ import main
from connector_tax.settings.inside import resolve
from connector_tax.settings.matrix import state_of

# As pydantic prints them.
WITHOUT_FIELD = """1 validation error for KVTransferConfig
  Value error, Please specify kv_role when kv_connector is set [type=value_error, input_value=
{'kv_connector': 'A'}, input_type=dict]
    For further information visit https://errors.pydantic.dev/2.11/v/value_error"""
WITH_FIELDS = """2 validation errors for KVTransferConfig
kv_role
  Input should be 'kv_producer', 'kv_consumer' or 'kv_both' [type=literal_error]
kv_port
  Input should be a valid integer [type=int_type]"""


def _raised(folder: Path, module: str, code: str) -> dict[str, Any]:
    """Return the record of the error that a function `work` of a module in `folder` raises."""
    file = folder / f"{module.replace('.', '/')}.py"
    file.parent.mkdir(parents=True)
    file.write_text(code)
    spec = util.spec_from_file_location(module, file)
    assert spec is not None
    assert spec.loader is not None
    loaded = util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    with pytest.raises(BaseException) as caught:
        loaded.work()
    return resolve.described(caught.value)


@pytest.mark.parametrize("place", ["lib/site-packages", "lib/python3/dist-packages", "checkout"])
def test_refusal_is_recognised_wherever_vllm_is_installed(tmp_path: Path, place: str) -> None:
    code = "def work():\n    raise ValueError('too small')\n"
    error = _raised(tmp_path / place, "vllm.v1.core.kv_cache_utils", code)
    assert error["frames"][-1] == "vllm/v1/core/kv_cache_utils.py:2"
    assert state_of({"error": error}, "resolves") == "refuses"


@pytest.mark.parametrize(
    "raised",
    [
        "MemoryError()",
        "RecursionError()",
        "SystemExit(1)",
        "KeyboardInterrupt()",
        "__import__('importlib.metadata').metadata.PackageNotFoundError('lmcache')",
        "type('OwnError', (TypeError,), {})('x')",
        "ValueError('x') from __import__('zipimport').ZipImportError('y')",
    ],
)
def test_error_of_the_machine_or_of_a_package_is_not_a_refusal(tmp_path: Path, raised: str) -> None:
    error = _raised(
        tmp_path / "site-packages", "vllm.config.vllm", f"def work():\n    raise {raised}\n"
    )
    assert state_of({"error": error}, "resolves") == "not resolved"


def test_reason_of_a_rejected_configuration_names_its_field() -> None:
    reason = "Please specify kv_role when kv_connector is set"
    assert resolve.reason_in(WITHOUT_FIELD) == reason
    option = "argument --kv-transfer-config: "
    assert resolve.reason_in(option + WITHOUT_FIELD) == option + reason
    one = "kv_role: Input should be 'kv_producer', 'kv_consumer' or 'kv_both'"
    assert resolve.reason_in(option + WITH_FIELDS) == option + one
    assert resolve.reason_in("no report: [type=x]") == "no report: [type=x]"


def test_process_that_dies_or_hangs_has_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def killed() -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGKILL)
        return {}

    def hanging() -> dict[str, Any]:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # pytest's own time limit may handle it
        signal.pause()
        return {}

    assert resolve.forked(lambda: {"settings": {}}) == {"settings": {}}
    assert resolve.forked(killed) == {"died": "signal 9"}
    monkeypatch.setattr(resolve, "LONGEST_S", 1)
    assert resolve.forked(hanging) == {"died": "signal 14 after 1 s, the longest time"}


def test_vllm_without_a_device_on_this_machine_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "def get_device_name(self):\n        raise NotImplementedError"
    unspecified = f"class P:\n    device_type = ''\n    {name}\ncurrent_platform = P()"
    files = {
        "vllm/__init__.py": "__version__ = '0.32.0'",
        "vllm/platforms.py": unspecified,
        "torch.py": "__version__ = '2'",
        "transformers.py": "__version__ = '5'",
    }
    (tmp_path / "vllm").mkdir()
    for name, content in files.items():
        (tmp_path / name).write_text(content + "\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert main(["--python", sys.executable, "--model", "tiny-qwen3"]) == 3
    err = capsys.readouterr().err
    assert "vLLM 0.32.0 lacks what this command uses: a device on this machine" in err
