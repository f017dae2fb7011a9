"""Test that locks are installed from pip's configured sources, each file by its hash."""

import base64
import hashlib
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from connector_tax.config import ROOT
from connector_tax.install import from_pip, install

WHEEL = "tiny-1.0-py3-none-any.whl"
FILES = {
    "tiny.py": "state = 'installed'\n",
    "tiny-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n",
    "tiny-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
}


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with one wheel, named by pip's configuration and by nothing else."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    with zipfile.ZipFile(folder / WHEEL, "w") as archive:
        record = ""
        for name, content in FILES.items():
            archive.writestr(name, content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content.encode()).digest())
            record += f"{name},sha256={digest.decode().rstrip('=')},{len(content)}\n"
        archive.writestr("tiny-1.0.dist-info/RECORD", f"{record}tiny-1.0.dist-info/RECORD,,\n")
    configuration = tmp_path / "pip.conf"
    configuration.write_text(f"[global]\nfind-links = {folder}\nindex-url = file://{folder}\n")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(configuration))
    return folder


def test_lock_is_installed_from_the_configured_pip_index(wheels: Path, tmp_path: Path) -> None:
    python, lock = tmp_path / "env" / "bin" / "python", tmp_path / "lock"
    venv.create(tmp_path / "env")
    digest = hashlib.sha256((wheels / WHEEL).read_bytes()).hexdigest()
    lock.write_text(f"tiny==1.0 \\\n    --hash=sha256:{'0' * 64}\n")
    with pytest.raises(subprocess.CalledProcessError):
        install(lock, str(python), ["--offline"])
    lock.write_text(f"tiny==1.0 \\\n    --hash=sha256:{digest}\n")
    install(lock, str(python), ["--offline"])
    command = [str(python), "-c", "import tiny; print(tiny.state)"]
    assert subprocess.run(command, check=True, capture_output=True).stdout == b"installed\n"


@pytest.mark.usefixtures("wheels")
def test_every_uv_command_of_the_makefile_takes_pips_configured_index(tmp_path: Path) -> None:
    required, lock = tmp_path / "requirements.in", tmp_path / "lock"
    required.write_text("tiny\n")
    command = [sys.executable, "-m", "connector_tax.install", "uv", "pip", "compile", "--quiet"]
    options = ["--offline", "--generate-hashes", "-o", str(lock), str(required)]
    subprocess.run([*command, *options], check=True)
    assert "tiny==1.0" in lock.read_text()
    recipes = (ROOT / "Makefile").read_text()
    assert recipes.count("$(UV) ") == 4
    assert "/uv " not in recipes


def test_installed_modules_are_compiled_under_dontwritebytecode(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    python, lock = tmp_path / "env" / "bin" / "python", tmp_path / "lock"
    venv.create(tmp_path / "env")
    digest = hashlib.sha256((wheels / WHEEL).read_bytes()).hexdigest()
    lock.write_text(f"tiny==1.0 \\\n    --hash=sha256:{digest}\n")
    install(lock, str(python), ["--offline"])
    assert list((tmp_path / "env").rglob("__pycache__/tiny.*.pyc"))


def test_pip_environment_variable_overrides_its_configuration_file(
    wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "/one /two")
    monkeypatch.setenv("PIP_CERT", "/ca.pem")
    variables = from_pip()
    assert variables["UV_DEFAULT_INDEX"] == f"file://{wheels}"
    assert variables["UV_FIND_LINKS"] == "/one,/two"
    assert variables["SSL_CERT_FILE"] == "/ca.pem"


def test_credentials_of_an_index_url_are_on_no_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://user:pa55word@127.0.0.1:1/simple")
    lock = tmp_path / "lock"
    lock.write_text(f"tiny==1.0 \\\n    --hash=sha256:{'0' * 64}\n")
    with pytest.raises(subprocess.CalledProcessError) as failed:
        install(lock, sys.executable, ["--offline"])
    assert "pa55word" not in str(failed.value.cmd)


def test_missing_lock_ends_the_command_with_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "connector_tax.install", str(tmp_path / "none.lock")]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert "none.lock" in done.stderr
    assert "Traceback" not in done.stderr
