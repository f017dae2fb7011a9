"""Test that the command's lines fit the terminal, and errors take two lines."""

import os
import pty
import re
import subprocess
import sys

import pytest

from connector_tax.loadgen.arguments import parse_arguments
from connector_tax.loadgen.spellings import PEERS
from tests.loadgen.fault_server import Pause, good_answer, serve

COMMAND = (sys.executable, "-m", "connector_tax.loadgen")


def shown(arguments: list[str], columns: int) -> str:
    """Run the command in a terminal with `columns` columns; return its output."""
    main, terminal = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "LINES": "24", "TERM": "xterm"}
    with subprocess.Popen(
        [*COMMAND, *arguments], stdin=terminal, stdout=terminal, stderr=terminal, env=environment
    ):
        os.close(terminal)
        written = b""
        try:
            while data := os.read(main, 1 << 16):
                written += data
        except OSError:  # Linux: the other end is closed
            pass
    os.close(main)
    return written.decode()


@pytest.mark.parametrize("columns", [40, 80])
def test_every_line_fits_the_terminal(columns: int) -> None:
    with serve(Pause(0.3), good_answer()) as server:
        text = shown(
            [
                *("--url", f"http://127.0.0.1:{server.port}", "--model", "m", "--no-ready-check"),
                *("--prompt", "p", "--rate", "20", "--duration", "1.8", "--no-affinity"),
            ],
            columns,
        )
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "\n").split("\n")
    assert max(map(len, lines)) <= columns
    live = [line for line in lines if re.match(r"\d+ s: \d+ sent", line)]
    assert len(live) >= 2
    assert "checks pass" in text


def test_unknown_option_is_refused_in_two_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_arguments(["--url", "http://x", "--prompt", "p", "--concurrency", "many"])
    assert ended.value.code == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert error == "error: argument --concurrency: invalid int value: 'many'"
    assert hint == "hint: connector-tax loadgen --help lists every option"


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("--request-rate=5", "--request-rate; did you mean --rate?"),
        ("--num-prompts", "--num-prompts; did you mean --requests?"),
        ("--max-concurrency", "--max-concurrency; did you mean --concurrency?"),
        ("--isl", "--isl; did you mean --prompt-tokens?"),
        ("--api-key", "--api-key; did you mean --api-key-env NAME?"),
        ("--concurency", "--concurency; did you mean --concurrency?"),
        ("--num_prompts=5", "--num_prompts; did you mean --requests?"),
        ("--max_tokens", "--max_tokens; did you mean --max-tokens?"),
        ("--conc", "--conc; did you mean --concurrency?"),
        ("--qps", "--qps; did you mean --rate?"),
        ("--frobnicate", "--frobnicate\n"),
    ],
)
def test_option_of_another_client_is_refused_with_the_equivalent_option(
    word: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_arguments([word, "5"])
    assert ended.value.code == 2
    assert f"error: unknown option {meant}" in capsys.readouterr().err


def test_every_suggested_option_exists(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--help"])
    options = set(re.findall(r"--[a-z][a-z-]*", capsys.readouterr().out))
    offered = {name for text in PEERS.values() for name in re.findall(r"--[a-z][a-z-]*", text)}
    assert offered <= options
    assert not options & PEERS.keys()
