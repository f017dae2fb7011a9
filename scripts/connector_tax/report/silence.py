"""Did the server stand still? The longest time in which requests were in flight and no token came.

A token is seen when a read brought it, where a study keeps its reads; else when a request's first
or last token came, and when a step of the engine that scheduled tokens was logged. With neither
reads nor steps the tokens between a request's first and last are not known, and nor is the silence.

The bound is LEAST_S, or TTFTS times the cell's shortest TTFT where that is longer: alone, a prompt
is silent for as long as its own TTFT. LEAST_S is nine times the longest silence in a valid cell of
the two shipped archives, 0.105 s (tests/report/test_silence.py). A cell beyond the bound is flagged
and keeps its numbers.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from connector_tax.artifacts.cell_records import MeasuredWindow
from connector_tax.files import reading

LEAST_S = 1.0
TTFTS = 3.0


class Silence(NamedTuple):
    """The longest silence of a cell, and its bound, in s."""

    longest_s: float
    bound_s: float

    @property
    def flagged(self) -> bool:
        """Whether the server stood still for longer than a cell's own prompts explain."""
        return self.longest_s > self.bound_s


class _Request(msgspec.Struct):
    t_send_ns: int | None
    t_first_token_ns: int | None
    t_last_token_ns: int | None
    t_done_ns: int | None
    reads: list[tuple[int, int]] | None = None


def silence(path: Path, steps_ns: NDArray[np.float64], window: MeasuredWindow) -> Silence | None:
    """The longest silence of a cell from the end of its warm-up on; None where it is not known.

    Args:
        path: its requests file, of which the hash has been checked.
        steps_ns: when steps that scheduled tokens were logged.
        window: when the cell's parts began and ended.
    """
    with reading(path):
        lines = path.read_bytes().splitlines()
    sent = [r for r in map(msgspec.json.Decoder(_Request).decode, lines) if r.t_send_ns is not None]
    firsts = [r.t_first_token_ns for r in sent if r.t_first_token_ns is not None]
    reads = [t_ns for r in sent for t_ns, _ in r.reads or ()]
    if not firsts or not (reads or len(steps_ns)):
        return None
    lasts = [r.t_last_token_ns for r in sent if r.t_last_token_ns is not None]
    lives = [(r.t_send_ns or 0, r.t_done_ns or window["t_stop_ns"]) for r in sent]
    seen = np.concatenate([firsts, lasts, reads if reads else steps_ns]).astype(float)
    ttfts = [r.t_first_token_ns - r.t_send_ns for r in sent if r.t_first_token_ns and r.t_send_ns]
    bound_s = max(LEAST_S, TTFTS * min(ttfts) / 1e9)
    return Silence(longest_silence_s(lives, seen, window["t_warmup_end_ns"]), bound_s)


def longest_silence_s(
    lives: Sequence[tuple[int, int]], tokens_ns: NDArray[np.float64], from_ns: float
) -> float:
    """The longest time from `from_ns` on with a request in flight and without a token.

    Args:
        lives: when each request was sent, and when it was over, in ns.
        tokens_ns: when tokens came, in any order.
        from_ns: what was before does not count.
    """
    sent, over = np.sort(np.array(lives, float).reshape(-1, 2), axis=0).T
    # A silence begins with a token, or with a request that is alone, and ends where none is left.
    alone = sent[np.searchsorted(sent, sent, "left") == np.searchsorted(over, sent, "right")]
    last = over[np.searchsorted(sent, over, "right") == np.searchsorted(over, over, "right")]
    moments = np.concatenate([tokens_ns, alone, last, [from_ns]])
    moments = np.sort(moments[moments >= from_ns])
    middles = (moments[1:] + moments[:-1]) / 2
    in_flight = np.searchsorted(sent, middles) > np.searchsorted(over, middles)
    return float(np.diff(moments)[in_flight].max(initial=0.0)) / 1e9
