"""Install hashed locks with uv, which takes seconds where pip takes minutes.

uv does not read pip's configuration, so pip's package sources are passed to it. The Makefile runs
this before anything is installed, so it needs only pip and the standard library:
`install.py LOCK...`, or `install.py uv ARGUMENTS` for another command of uv.
"""

import ast
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

LOCK = Path(__file__).parents[2] / "envs" / "pipeline.lock"
_UV = re.compile(r"^uv==.*\n(?: .*\n)*", re.MULTILINE)
# pip's setting -> uv's variable for it, and the separator of values. Variables instead of options,
# since an address may contain a password and a command line is public.
_VARIABLES = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "proxy": ("ALL_PROXY", " "),
}
# Later entries of pip's configuration take precedence.
_SECTIONS = ("global", "install", ":env:")


def install(lock: Path, python: str = sys.executable, options: Sequence[str] = ()) -> None:
    """Install a lock's packages, each file with one of the listed hashes.

    Args:
        lock: pins with hashes.
        python: interpreter of the environment.
        options: further options of `uv pip install`.

    Raises:
        subprocess.CalledProcessError: uv failed, and printed the reason.
    """
    # Bytecode is compiled, or each process would compile it in a read-only environment or under
    # PYTHONDONTWRITEBYTECODE.
    run_uv(["pip", "install", "--quiet", "--python", python, "--compile-bytecode",
            "--require-hashes", *options, "-r", str(lock)])  # fmt: skip


def run_uv(arguments: Sequence[str]) -> None:
    """Run uv, installed first if it is missing, with pip's package sources.

    Raises:
        subprocess.CalledProcessError: uv failed, and printed the reason.
    """
    if importlib.util.find_spec("uv") is None:
        _install_uv()
    # All indexes are searched, as by pip.
    settings = {"UV_INDEX_STRATEGY": "unsafe-best-match", **from_pip()}
    command = [sys.executable, "-m", "uv", *arguments]
    subprocess.run(command, check=True, env=os.environ | settings)


def from_pip() -> dict[str, str]:
    """Return uv's environment variables that correspond to pip's configuration."""
    pip = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(pip, check=True, capture_output=True, text=True).stdout
    settings: dict[str, dict[str, str]] = {section: {} for section in _SECTIONS}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        settings.setdefault(section, {})[key] = ast.literal_eval(value)
    of: dict[str, str] = {}
    for section in _SECTIONS:
        of |= settings[section]
    return {
        name: between.join(of[key].split())
        for key, (name, between) in _VARIABLES.items()
        if key in of
    }


def _install_uv() -> None:
    """Install uv with pip, from the pipeline's lock."""
    entry = _UV.search(LOCK.read_text(encoding="utf-8"))
    assert entry is not None
    with tempfile.NamedTemporaryFile("w", suffix=".lock") as lock:
        lock.write(entry[0])
        lock.flush()
        pip = [sys.executable, "-m", "pip", "install", "-q", "--require-hashes", "-r", lock.name]
        subprocess.run(pip, check=True)


if __name__ == "__main__":
    try:
        if sys.argv[1:2] == ["uv"]:
            run_uv(sys.argv[2:])
        else:
            for name in sys.argv[1:]:
                install(Path(name))
    except subprocess.CalledProcessError as error:
        sys.exit(f"{error.cmd[0]} ended with status {error.returncode}")
