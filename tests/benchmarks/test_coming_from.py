"""The lines of docs/coming-from.md do the work that they are said to do."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from connector_tax.config import ROOT
from connector_tax.loadgen.__main__ import main
from tests.loadgen.fault_server import HEAD, chunked, event, serve, token, usage

PAGE = (ROOT / "docs/coming-from.md").read_text()
(COMMON,) = re.findall(r"`python -m connector_tax\.loadgen (.+?)`", PAGE)
LINES = re.findall(r"^\| `-.+?` \| `(.+?)` \|", PAGE, re.M)
TOKENS = [event(token())] * 15
ANSWER = HEAD + chunked(
    *TOKENS, event(token(finish="length")), event(usage(8, 16)), event("[DONE]")
)


@pytest.mark.parametrize("ours", sorted(set(LINES)))
def test_our_line_sends_what_it_says(ours: str, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    chat = "--chat" in ours
    common = COMMON.replace("--prompt-tokens", "--prompt-words") if chat else COMMON
    with serve(ANSWER) as server:
        words = shlex.split(common.replace("URL", f"http://127.0.0.1:{server.port}"))
        line = [*words, *shlex.split(ours), "--no-affinity", "--output", str(output)]
        assert main(line) in (0, 1)
        bodies = server.bodies
    records: list[dict[str, Any]] = list(map(json.loads, output.open()))
    assert {record["status"] for record in records} == {"ok"}
    assert {body["max_tokens"] for body in bodies} == {16}
    assert all(("messages" in body) == chat for body in bodies)
    assert len(bodies) == len(records)
    asked = re.search(r"--requests (\d+)", ours)
    assert asked is None or len(records) == int(asked[1])


def test_the_page_has_twenty_lines() -> None:
    assert len(LINES) == 20
