"""Start any OpenAI-compatible server by its command line.

It runs in the folder and with the environment of the user who starts the study. Its properties were
queried before the study was resolved (`ab.ask`), and are recorded in the study's `engine` section.
"""

from __future__ import annotations

import contextlib
import glob
import itertools
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from connector_tax.artifacts.names import Launch, baseline_of
from connector_tax.foreign import is_secret
from connector_tax.servers.kinds import (
    STEP_LOG_PREFIX,
    STEP_LOG_VARIABLE,
    Companion,
    ProbedEngine,
    ServerCommand,
    ServerError,
    below_root,
    free_port,
)

if TYPE_CHECKING:
    from connector_tax.artifacts.study_records import (
        EngineSection,
        ServedSection,
        StudyDocument,
    )

PORT_MARK = "{port}"
_RUNNING = re.compile(r"(?P<host>https?://[^/?#\s]+)(?P<path>(?:/[^?#\s]*)?)")
_COMPANION_PORT = re.compile(r"\{(beside\d+)\.port\}")
_PORT = re.compile(r"\{(?:beside\d+\.)?port\}")
_JSON = re.compile(r"(?<![^\s=])\{")
_OPERATORS = "|&;<>()"
_NAME = r"\$(?P<brace>\{)?(?P<name>[A-Za-z_]\w*)(?(brace)\})"
# Parts that a shell expands, and quotes that prevent it.
_EXPANDED = re.compile(
    rf"""'[^']*'|\\.|"(?P<double>(?:\\.|[^"\\])*)"|{_NAME}"""
    r"""|(?<!\S)(?P<assigned>[A-Za-z_]\w*=)?(?P<home>~[\w.-]*)(?=/|\s|$)""",
    re.DOTALL,
)
# A line that a backslash continues.
_CONTINUED = re.compile(r"""('[^']*'|\\[^\n])|\\\n""")
# Substitutions and parameters other than $NAME and ${NAME}.
_SUBSTITUTED = re.compile(r"`|\$[(\[\d$?!@#*-]|\$\{(?![A-Za-z_]\w*\})")
# Outside quotes: a string with escapes ($'...'), and a home before or behind a colon of an
# assignment.
_BY_SHELL = re.compile(r"""\$['"]|^[A-Za-z_]\w*=(?:.*:~|~[\w.-]*:)""")
# The innermost braces of a word, and what makes several words of them: a list or a sequence.
_BRACES, _BRACED_NAME = re.compile(r"\{([^{}]*)\}"), re.compile(r"\$\{\w+\}")
_SEVERAL = re.compile(r".*,.*|(?:-?\d+\.\.-?\d+|[A-Za-z]\.\.[A-Za-z])(?:\.\.-?\d+)?", re.DOTALL)
# Quoted parts in which a shell runs nothing.
_LITERAL = re.compile(r"""'[^']*'|\\.""", re.DOTALL)
_WORD = re.compile(r"""(?:'[^']*'|"(?:\\.|[^"\\])*"|\\.|[^\s'"\\])+""", re.DOTALL)
_QUOTED = re.compile(r"""\\.|'[^']*'|"(?:\\.|[^"\\])*\"""", re.DOTALL)
_QUOTES, _PATTERN = frozenset("'\"\\"), frozenset("*?[")
# In double quotes: an escaped character, or a variable.
_IN_DOUBLE = re.compile(rf'\\(?P<escaped>[\\"$`])|{_NAME}')
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
# Words that begin a command and are part of the shell.
_OF_SHELL = frozenset(
    {
        *(".", "!", "[[", "{", "alias", "case", "cd", "command", "declare", "eval", "exec"),
        *("export", "for", "function", "if", "local", "pushd", "set", "shopt", "source", "time"),
        *("trap", "ulimit", "umask", "unset", "until", "while"),
    }
)


class Command(ProbedEngine):
    """A server started by a command line; if it is a vLLM, it may have the step probe."""

    needs = ("device", "commands", "served")
    may = ("environment", "pythonpath", "beside", "access")
    gate_s = 0.0

    def __init__(self, section: EngineSection) -> None:
        super().__init__(section)
        # The label of an embedded engine contains the word.
        self.emulated = "emulated" in section["label"]
        self.no_steps = section.get("served", {}).get("no_steps")
        self.takes_probe = self.no_steps is None

    @property
    def served(self) -> ServedSection:
        """Return the section `served` as the study's file has it."""
        return self.section["served"]

    def gate_of(self, _entry: object, /) -> None:
        """Return None: each server was started and probed before the study."""

    def command(
        self, study: StudyDocument, launch: Launch, port: int, probe: Path | None, /
    ) -> ServerCommand:
        """Return the configuration's command, its companions, and the environment of both."""
        baseline = baseline_of(study["config"])
        return server_command(self.section, launch.configuration, baseline, port, probe)

    def versions(self) -> dict[str, str]:
        """Return the answer of the server's /version."""
        known = self.served.get("version")
        return super().versions() | ({"vllm": known} if known else {})


def split_command(line: str) -> list[str]:
    """Split a command line as a shell does, but keep JSON with its quotes as one word.

    JSON inside the outer shell's quotes needs no second quoting.

    Raises:
        ValueError: a quote is not closed.
    """
    return shlex.split(_with_quoted_json(line))


def _with_quoted_json(line: str) -> str:
    # A port mark outside strings becomes a number, so that the JSON is valid.
    content = _PORT.sub(lambda match: "1" * len(match[0]), line)
    quoted, done = "", 0
    for start in (match.start() for match in _JSON.finditer(line)):
        # JSON that begins with a port mark is only a word.
        if start >= done and content[start] == line[start]:
            with contextlib.suppress(ValueError):
                # Raises if the JSON is inside quotes, which then have no end before it.
                shlex.split(line[done:start])
                _, end = json.JSONDecoder().raw_decode(content, start)
                quoted += line[done:start] + shlex.quote(line[start:end])
                done = end
    return quoted + line[done:]


def expanded(line: str, variables: Mapping[str, str]) -> str:
    """Return a command line with its variables and `~` expanded, as a shell would.

    Lines that a backslash continues are joined. Single-quoted parts and JSON are not expanded. The
    result is recorded, so it must not contain a secret.

    Raises:
        ServerError: a variable is not set, looks like a secret or needs quotes, or the line needs a
            shell; the text gives the remedy.
        ValueError: a quote is not closed.
    """
    text = _with_quoted_json(_CONTINUED.sub(r"\g<1>", line.strip()))
    needs_shell = f"and a command is started without a shell; allowed: bash -c {shlex.quote(text)}"
    operators = shlex.shlex(text, posix=True, punctuation_chars=_OPERATORS)
    operators.whitespace_split = True
    operators.commenters = ""
    for word in operators:
        if word and not set(word) - set(_OPERATORS):
            raise ServerError(f"found {word}, {needs_shell}")

    if "\n" in _bare(text):
        raise ServerError(f"found a line break, {needs_shell}")
    assigns = True
    for word in _WORD.findall(text):
        assigns = assigns and _ASSIGNMENT.match(word) is not None
        # A shell expands no braces in an assignment.
        if not assigns and _makes_several(word):
            raise ServerError(
                f"found {word}: a shell makes several words of it, {needs_shell}; for one word:"
                f" '{word}'"
            )
        # A shell runs substitutions within double quotes, too.
        runs = word[0] == "#" or _SUBSTITUTED.search(_LITERAL.sub("", word))
        runs = runs or _BY_SHELL.search(_bare(word))
        # A pattern that names no file reaches a command as it is.
        files = not set(word) & _QUOTES and set(word) & _PATTERN and glob.glob(word)  # noqa: PTH207
        if runs or files:
            raise ServerError(f"found {word}, {needs_shell}")

    def value(match: re.Match[str]) -> str:
        if match["double"] is not None:
            # Single-quoted, so that it is not expanded again.
            return shlex.quote(_IN_DOUBLE.sub(in_double, match["double"]))
        if match["home"]:
            # Path.expanduser fails for an unknown user; a shell keeps the text.
            home = os.path.expanduser(match["home"])  # noqa: PTH111
            return f"{match['assigned'] or ''}{shlex.quote(home)}"
        return unquoted(match) if match["name"] else match[0]

    def unquoted(match: re.Match[str]) -> str:
        known = variable(match).strip()
        if len(known.split()) > 1:
            raise ServerError(
                f"found {match[0]}, whose value has blanks, which a shell splits into several"
                f' words, {needs_shell}; to keep one word, write "{match[0]}"'
            )
        # Without a value it is no word.
        return known and shlex.quote(known)

    def in_double(match: re.Match[str]) -> str:
        return match["escaped"] or variable(match)

    def variable(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in variables:
            raise ServerError(f"found ${name}, which is not set; set it, or leave it out")
        if is_secret(name, variables[name]):
            raise ServerError(
                f"found ${name}, which looks like a secret (not shown), but commands are recorded;"
                " leave it out: the server reads it from its environment"
            )
        return variables[name]

    return _EXPANDED.sub(value, text)


def with_homes(value: str) -> str:
    """Return an assigned value with `~` expanded as a shell would: at its start and after a colon.

    A `~` before the name of an unknown user stays, as in a shell.
    """
    # Path.expanduser fails for an unknown user.
    return ":".join(map(os.path.expanduser, value.split(":")))


def _makes_several(word: str) -> bool:
    """Return whether a shell makes several words of the braces outside quotes."""
    rest = _BRACED_NAME.sub("", _bare(word))
    while braces := _BRACES.search(rest):
        if _SEVERAL.fullmatch(braces[1]):
            return True
        rest = rest[: braces.start()] + rest[braces.end() :]
    return False


def _bare(text: str) -> str:
    """Return a command line without the content of its quotes and without escaped characters."""
    return _QUOTED.sub(lambda match: "" if match[0][0] == "\\" else 2 * match[0][0], text)


def running_url(text: str) -> str | None:
    """Return a running server's base URL, without /v1; None if `text` is a command.

    Raises:
        ServerError: the URL has another path.
    """
    match = _RUNNING.fullmatch(text)
    if match is None:
        return None
    path = match["path"].rstrip("/")
    if path and not path.endswith("/v1"):
        raise ServerError(f"found the path {path}; allowed: none, or a base that ends in /v1")
    # Only for http, since a certificate is issued for the name localhost.
    host = re.sub(r"^http://localhost(?=:|$)", "http://127.0.0.1", match["host"])
    return host + path.removesuffix("/v1")


def missing_command(line: str) -> str | None:
    """Return why the first word of a user's command line cannot be started; None if it can."""
    words = split_command(line)
    assigned = list(itertools.takewhile(_ASSIGNMENT.fullmatch, words))
    # A command with its own PATH is looked up when it is started.
    if any(word.startswith("PATH=") for word in assigned) or len(assigned) == len(words):
        return None
    name = words[len(assigned)]
    search = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    if shutil.which(name, path=search):
        return None
    if Path(name).exists():
        return f"found the command {name}, which is not executable; run chmod +x {name}"
    if name in _OF_SHELL:
        return f"found {name}, which is part of a shell; allowed: bash -c {shlex.quote(line)}"
    where = f"at {Path(name).absolute()}" if os.sep in name else "in PATH"
    before = f" ({assigned[-1].partition('=')[0]}=... sets a variable)" if assigned else ""
    absent = f"which does not exist {where}{before}"
    return f"found the command {name}, {absent}; install it, or name another"


def server_command(
    section: EngineSection, name: str, baseline: str, port: int, probe: Path | None
) -> ServerCommand:
    """Return the content of launch.sh for a user's command line or a running server's URL.

    `{port}` is the server's port, or a companion's own port, which the server gets as
    `{beside1.port}` and so on. The baseline has no companions: they are part of the candidates'
    costs.

    Raises:
        ServerError: the line is not a command.
    """
    text = section["commands"][name]
    companion_lines = [] if name == baseline else section.get("beside", [])
    access = section.get("access", {})
    if (running := running_url(text)) is not None:
        argv = ["sleep", "infinity"]
        return ServerCommand(argv, {}, callers=True, running=running, access=access)
    ports = {f"beside{number}": free_port() for number in range(1, len(companion_lines) + 1)}

    def replaced(line: str, line_port: int) -> list[str]:
        def port_of(match: re.Match[str]) -> str:
            if match[1] not in ports:
                raise ServerError(f"{match[0]}: --beside is given {len(companion_lines)} times")
            return str(ports[match[1]])

        words = (word.replace(PORT_MARK, str(line_port)) for word in split_command(line))
        return [_COMPANION_PORT.sub(port_of, word) for word in words]

    argv = replaced(text, port)
    assignments = {}
    while argv and (assigned := _ASSIGNMENT.fullmatch(argv[0])):
        assignments[assigned[1]] = assigned[2]
        argv = argv[1:]
    companions = [
        Companion(name, replaced(line, ports[name]), ports[name])
        for name, line in zip(ports, companion_lines, strict=True)
    ]
    path = [*([below_root(probe)] if probe else []), *section.get("pythonpath", [])]
    variables = {**section.get("environment", {}), **assignments}
    given = variables.get("PYTHONPATH") or os.environ.get("PYTHONPATH")
    if path:
        variables["PYTHONPATH"] = ":".join([*path, *([given] if given else [])])
    if probe:
        variables[STEP_LOG_VARIABLE] = f"{{here}}/{STEP_LOG_PREFIX}"
    return ServerCommand(argv, variables, companions=companions, callers=True, access=access)


KIND = Command
