"""Handle text written by others: find secrets in it, and make it harmless for a terminal.

One list of names and one of patterns serves configurations, command lines of `connector-tax ab`,
logs and packing. No function here returns a secret.
"""

import os
import re
import unicodedata
from collections.abc import Mapping
from typing import Any

# Names of secrets; then names of secrets if the value is text and not a number.
_OF_A_SECRET = re.compile(
    r"passw|passphrase|pwd|(?<!by)(?<!com)pass(?:$|[-_.](?!config))|secret|credential"
    r"|auth(?!ors?(?:[-_.]|$))|(?:api|access|private|account)[-_.]?key"
    r"|(?:^|[-_.])sig(?:nature)?(?:[-_.]|$)",
    re.IGNORECASE,
)
_PERHAPS = re.compile(
    r"token(?!iz|is)|key(?!file|board|[-_.]?path)|cookie|(?:^|[-_.])login", re.IGNORECASE
)
# Options whose value is a user name, with or without password.
_OF_A_USER = re.compile(r"-u|--(?:proxy-)?user")
_USER_AND_PASSWORD = re.compile(r"(?!\d+:\d+$)[^\s:/$]+:(?![\s/$]).+", re.DOTALL)
_NUMBER = re.compile(r"-?\d+(\.\d+)?|0x[\da-fA-F]+")
# Harmless values in a command: empty, a switch, a shell variable, a mark, a log's placeholder.
_HARMLESS = re.compile(
    r"|[Tt]rue|[Ff]alse|None|null|\*+|<[\w -]*>?|\$\{?[A-Z_\d]+\}?|%\w|\{[\w.]+\}"
)
# Tokens by their form, credentials in a URL or header, commands with a password.
_FORM = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}|\b(?:sk|glpat|nvapi|xapp|xox[abceoprs])-[\w-]{16,}"
    r"|\bgh[pousr]_\w{20,}|\bgithub_pat_\w{20,}|\b(?:gsk|r8|npm|dckr_pat)_\w{20,}"
    r"|\bA(?:KIA|SIA)[A-Z0-9]{16}\b|\bAIza[\w-]{35}|\beyJ[\w-]{1,999}\.eyJ"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY"
    r"|\bhooks\.slack\.com/\w+/\S|\bdiscord(?:app)?\.com/api/webhooks/\S"
    r"|://(?:[^/\s@:]*:(?!\$)[^/\s@]+|(?!\$)[^/\s@:]+)@"
    r"|\b(?i:bearer\s+|authorization:\s*|cookie:\s*)(?!\$)\S{8}"
    r"|(?:^|[\s\"'])(?:-u\s*|--(?:proxy-)?user[\s=]+)[\"']?(?!\d+:\d+\b)[^\s:/$\"']+:(?!\$)[^\s/:\"']"
    r"|\bsshpass\s+-p\s*(?!\$)\S"
)
# Pairs in a command, URL, JSON or header: --name value, name=value, "name": "value", name: value.
# No part starts within a name, else a long word takes quadratic time.
_NAMED = re.compile(
    r"""((?<![\w-])--[\w-]+\s+|(?<![\w.-])[\w.-]+=(?!=)|["'][\w.-]+["']\s*:\s*"""
    r"""|(?<![\w-])[\w-]+:\s+)(?=[\["'({]{0,9}([^\s&;,"']{1,999}))""",
)
# Least length of environment values to search for in logs: for a name of a secret, and for a name
# of a possible secret.
_LEAST, _LEAST_PERHAPS = 6, 12
REDACTED = "[a line that looked like a secret was removed here]"
# Escape sequences (window titles, colours, cursor, others), then all control characters except tab
# and line end.
_ESCAPES = re.compile(
    r"(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)?"
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?|\x1b[ -/]*[0-~]?"
)
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
# Control and format characters (such as those that reverse text), surrogates, line and paragraph
# separators.
_UNPRINTABLE = ("Cc", "Cf", "Cs", "Zl", "Zp")


def names_secret(name: str) -> bool:
    """Return whether a value under this name is a secret, whatever its form."""
    return _OF_A_SECRET.search(name) is not None


def is_secret(name: str, value: Any) -> bool:
    """Return whether `value` under `name` is plausibly a secret."""
    if _is_secret_of(name, value):
        return True
    return isinstance(value, str) and (
        holds_token(value) or any(_is_secret_of(named, of) for named, of in _pairs(value))
    )


def _is_secret_of(name: str, value: Any) -> bool:
    """Return whether `name` suggests that `value` is a secret."""
    if value is None or isinstance(value, bool) or _HARMLESS.fullmatch(str(value)):
        return False
    if names_secret(name):
        return True
    return isinstance(value, str) and (
        (_PERHAPS.search(name) is not None and not _NUMBER.fullmatch(value))
        or (_OF_A_USER.fullmatch(name) is not None and bool(_USER_AND_PASSWORD.fullmatch(value)))
    )


def holds_token(text: str) -> bool:
    """Return whether a text contains a token, or credentials in a URL or header."""
    return _FORM.search(text) is not None


def _pairs(text: str) -> list[tuple[str, str]]:
    """Return name and value of each pair in a command, URL, JSON or log."""
    pairs = ((m[1].strip(" =:\"'"), m[2].rstrip(")]}")) for m in _NAMED.finditer(text))
    return [(name, value) for name, value in pairs if not _HARMLESS.fullmatch(value)]


class LogSecrets:
    """Finds tokens, values whose names announce a secret, and the environment's secrets in logs.

    Logs contain many harmless names, such as `bos_token`: names of possible secrets count only if
    written like environment variables.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        values = {
            re.escape(value)
            for name, value in environment.items()
            if is_secret(name, value)
            and not value.startswith("/")
            and len(value) >= (_LEAST if names_secret(name) else _LEAST_PERHAPS)
        }
        self._values = re.compile(rf"(?<!\w)(?:{'|'.join(sorted(values))})(?!\w)")
        self._any = bool(values)

    def in_line(self, line: str) -> bool:
        """Return whether the line looks like it contains a secret."""
        if holds_token(line) or (self._any and self._values.search(line)):
            return True
        return any(
            names_secret(name) or (name.isupper() and _is_secret_of(name, value))
            for name, value in _pairs(line)
        )

    def lines(self, text: str) -> list[int]:
        """Return the numbers, from 1, of lines that look like they contain a secret."""
        return [n for n, line in enumerate(text.split("\n"), 1) if self.in_line(line)]

    def redacted(self, text: str) -> tuple[str, int]:
        """Return the text without lines that may contain a secret, and their number."""
        lines = text.split("\n")
        numbers = self.lines(text)
        for number in numbers:
            lines[number - 1] = REDACTED
        return "\n".join(lines), len(numbers)


def printable(text: str) -> str:
    """Return the text without escape sequences and control characters, for a terminal."""
    return _CONTROLS.sub("", _ESCAPES.sub("", text.replace("\r\n", "\n")))


def one_line(text: str) -> str:
    """Return the text on one line, with `\\u{a}` for a line end and such an escape for every other
    character that a terminal does not show.

    For lines with a verdict, which a name or value of another person's study must not imitate.
    """
    return "".join(
        f"\\u{{{ord(c):x}}}" if unicodedata.category(c) in _UNPRINTABLE else c for c in text
    )
