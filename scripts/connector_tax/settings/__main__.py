"""`connector-tax settings`: show how a KV connector changes vLLM's settings, without a GPU."""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

from connector_tax.commands import AnsweringParser
from connector_tax.config import ROOT
from connector_tax.files import ArtifactError, write_text
from connector_tax.settings import request as requests
from connector_tax.settings import table
from connector_tax.settings.arguments import parse
from connector_tax.settings.matrix import (
    Matrix,
    Row,
    answer_key,
    connectors_of,
    rows_of,
    status_of,
)
from connector_tax.settings.request import Case, Model, Request
from connector_tax.settings.run import Message, UnresolvedError, started

ENVIRONMENT = "vllm-settings"
HUB_FILES = Path(__file__).parents[1] / "vllm" / "hub_files.py"
# No GPU is used, nothing is fetched, no usage is reported.
ENVIRONMENT_VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "LMCACHE_TRACK_USAGE": "false",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the matrix; return an exit status for differences and unresolved rows."""
    options = parse(argv)
    began = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="connector-tax-models-") as scratch:
            python = options.python or own_python()
            names = options.model or requests.MODELS
            models = [requests.model(name, Path(scratch)) for name in names]
            _check_names([model["name"] for model in models])
            for model in models:
                _fetch(python, model)
            proof = requests.model(requests.PROOF, Path(scratch))
            matrix = resolve(python, request_of(options, models, proof))
    except ArtifactError as error:
        AnsweringParser(prog="connector-tax settings").error(str(error))
    except UnresolvedError as error:
        print(f"connector-tax settings: {error}", file=sys.stderr)
        return 3
    if options.json:
        print(json_text(matrix), end="")
    elif options.csv:
        print(table.as_csv(matrix), end="")
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print(table.as_text(matrix, width))
    print(f"resolved in {time.monotonic() - began:.0f} s", file=sys.stderr)
    if options.export_markdown is not None:
        try:
            write_text(options.export_markdown, table.as_markdown(matrix))
        except OSError as error:
            print(f"connector-tax settings: --export-markdown: {error}", file=sys.stderr)
            return 3
    return status_of(matrix)


def _check_names(names: list[str]) -> None:
    """Check that each model has a unique name, which identifies its rows.

    Raises:
        ArtifactError: two models have the same name.
    """
    if twice := [name for name in names if names.count(name) > 1]:
        raise ArtifactError(
            f"--model: {twice[0]!r} is the name of two models; give each model its own name"
        )


def request_of(options: Namespace, models: list[Model], proof: Model) -> Request:
    """Return the request for these options."""
    named: list[Case] = [*map(requests.connector, options.connector), *options.kv_transfer_config]
    cases = [requests.plain(), *named] if named else requests.all_cases()
    hidden = {} if options.python else {"CUDA_VISIBLE_DEVICES": ""}
    return {
        "gpu": None if options.python else options.gpu or "h200",
        "proof": proof,
        "models": models,
        "cases": cases,
        "every": not named,
        "capacity": True,
        "kv_gib": options.kv_gib,
        "lengths": list(requests.LENGTHS),
        "max_model_len": options.max_model_len,
        "tp": options.tp,
        "arguments": options.arguments,
        "packages": requests.names_of(cases),
        "environment": ENVIRONMENT_VARIABLES | hidden,
    }


def resolve(python: str, request: Request) -> Matrix:
    """Return the matrix of a request; print each row's name as it is resolved.

    Raises:
        UnresolvedError: the interpreter has no suitable vLLM.
        ArtifactError: a connector is not registered, or vLLM rejects its arguments.
    """
    with started(python, request) as messages:
        head = next(messages)
        second = next(messages)
        if second["kind"] == "missing":
            raise UnresolvedError(
                f"vLLM {head['version']} lacks what this command uses: {'; '.join(second['names'])}"
            )
        # Only cases named by the user must exist; others are left out if vLLM lacks their
        # connector.
        named = [] if request["every"] else request["cases"]
        for name in (name for case in named for name in requests.registered_in(case["transfer"])):
            if name not in second["registered"]:
                raise ArtifactError(
                    f"{name!r}: not registered by vLLM {head['version']}; allowed: "
                    + ", ".join(second["registered"])
                )
        connectors = connectors_of(second["cases"], second["packages"])
        try:
            rows = list(rows_of(_shown(messages)))
        finally:
            if sys.stderr.isatty():
                print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    vllm = {key: value for key, value in head.items() if key != "kind"}
    return {"vllm": vllm, "request": answer_key(request), "connectors": connectors, "rows": rows}


def _shown(messages: Iterator[Message]) -> Iterator[Message]:
    for message in messages:
        if message["kind"] == "end":
            return
        error = message.get("error", {})
        if error.get("type") == "ArgumentsError":
            raise ArtifactError(f"vLLM: {error['text']}")
        if sys.stderr.isatty():
            words = f"{message['model']}: {message['case'][:60]}"
            print(f"\r\x1b[K{words}", end="", file=sys.stderr, flush=True)
        yield message
    raise UnresolvedError("the program ended before its last answer")


def own_python() -> str:
    """Return the interpreter of this project's environment.

    Raises:
        UnresolvedError: the environment is not built.
    """
    folder = ROOT / "envs" / ENVIRONMENT / ".venv"
    if not (folder / "built.json").is_file():
        raise UnresolvedError(
            f"envs/{ENVIRONMENT} is not built: make {ENVIRONMENT} (3.4 GB), or name a vLLM of your"
            " own by --python"
        )
    return str(folder / "bin" / "python")


def _fetch(python: str, model: Model) -> None:
    """Fetch the small files of a hub's model into the cache.

    Raises:
        UnresolvedError: the files cannot be fetched.
    """
    if Path(model["folder"]).is_absolute():
        return
    command = [python, str(HUB_FILES), model["folder"], "", "dummy"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise UnresolvedError(f"{python}: does not run: {error.strerror}") from None
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
        raise UnresolvedError(f"{model['name']} is not a folder, and was not fetched: {last[0]}")


def lines(values: Sequence[object]) -> str:
    """Return values as JSON, one per line."""
    return ",\n  ".join(json.dumps(value, ensure_ascii=False) for value in values)


def json_text(matrix: Matrix) -> str:
    """Return the matrix as JSON, with one row per line."""
    rows: Sequence[Row] = matrix["rows"]
    return (
        f'{{"vllm": {json.dumps(matrix["vllm"])},\n "request": {json.dumps(matrix["request"])},\n'
        f' "connectors": [\n  {lines(matrix["connectors"])}],\n "rows": [\n  {lines(rows)}]}}\n'
    )


if __name__ == "__main__":
    sys.exit(main())
