"""Write requests to a file and show progress while a run goes on."""

import contextlib
import sys
from array import array
from collections import deque
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
from rich.console import Console
from rich.live import Live
from rich.text import Text

from connector_tax.files import standard_stream, write_all
from connector_tax.loadgen.latency import latency_columns
from connector_tax.loadgen.messages import LINE_FIELDS, RequestRecord
from connector_tax.loadgen.plan import Progress
from connector_tax.loadgen.throughput import PAIR_BYTES, TokenTimes, read_pairs

PENDING_BYTES = 1 << 20
"""Bytes of pending lines above which they are written at once."""
RECENT = 200
"""Number of latest successes in the displayed percentiles."""


class RecordSink:
    """A consumer of finished requests that writes a line for each and drops its reads' stamps.

    `itl_ms`: the gaps between successive reads with tokens, of the measured successes; 4 bytes
    each, where the records would need 16. A gap is divided among the tokens of an event that holds
    several. `tokens`: arrival times of tokens. `bundled`: measured successes with events
    that hold several tokens and do not count them. `problem`: why the file could not be written.
    """

    def __init__(self, path: Path | None, more: Mapping[str, Any], append: bool = False) -> None:
        """Open the output file for direct writing; raises OSError.

        Args:
            more: columns at the end of each line.
            append: continue a file that this command has begun.
        """
        self._more = more
        self.itl_ms = array("f")
        self.tokens = TokenTimes()
        self.bundled = 0
        self.problem: str | None = None
        self._path = path
        self._lines = bytearray()
        self._written = 0  # bytes of whole lines
        self._stream: BinaryIO | FileIO | None = None
        self._file: FileIO | None = None  # none of the standard streams
        if path is not None:
            self._stream = standard_stream(path)
            if self._stream is None:
                self._stream = self._file = path.open("ab" if append else "wb", buffering=0)
                self._written = path.stat().st_size
        self._encode = msgspec.json.Encoder().encode
        self._recent_ms: deque[float] = deque(maxlen=RECENT)
        self._tokens = 0
        self._last_shown = (0.0, 0)
        self._next_s = 0.0
        self._live: Live | None = None
        if sys.stderr.isatty():
            console = Console(stderr=True, highlight=False, markup=False)
            self._live = Live(
                console=console,
                auto_refresh=False,
                redirect_stdout=False,
                redirect_stderr=False,
            )

    def take(self, record: RequestRecord) -> None:
        if self._stream is not None:
            line = {**record.fields(LINE_FIELDS), **latency_columns(record), **self._more}
            self._lines += self._encode(line) + b"\n"
            if len(self._lines) > PENDING_BYTES:
                self._flush()
        if record.status == "ok" and record.t_first_token_ns is not None:
            self._recent_ms.append((record.t_first_token_ns - record.t_intended_ns) / 1e6)
            self._tokens += record.completion_tokens or 0
        self.tokens.take(record)
        if record.measured and record.status == "ok":
            self._note_bundles(record)
        if record.raw_reads is not None:
            # One read has no gap.
            if len(record.raw_reads) > PAIR_BYTES and record.status == "ok" and record.measured:
                stamps, counts = read_pairs(record.raw_reads)
                gaps_ms = np.diff(stamps) / 1e6
                if counts.sum() > (record.token_events or 0):
                    gaps_ms = np.repeat(gaps_ms / counts[1:], counts[1:])
                self.itl_ms.frombytes(gaps_ms.astype(np.float32).tobytes())
            record.raw_reads = None

    def _note_bundles(self, record: RequestRecord) -> None:
        tokens, events = record.completion_tokens or 0, record.token_events or 0
        if record.counted_by == "server" and tokens > events > 0:
            counted = events if record.raw_reads is None else read_pairs(record.raw_reads)[1].sum()
            self.bundled += bool(tokens > counted)

    def progress(self, progress: Progress) -> None:
        """Write pending lines to the file, and show progress.

        A terminal gets one live line; other outputs get a new line every five seconds.
        """
        self._flush()
        if progress.elapsed_s < self._next_s:
            return
        self._next_s = progress.elapsed_s + (1.0 if self._live is not None else 5.0)
        since_s, tokens = self._last_shown
        self._last_shown = progress.elapsed_s, self._tokens
        rate = (self._tokens - tokens) / max(progress.elapsed_s - since_s, 1e-9)
        latest = ""
        if self._recent_ms:
            p50, p90 = np.percentile(self._recent_ms, (50, 90))
            latest = f", TTFT p50 {p50:.0f} p90 {p90:.0f} ms, {rate:,.0f} tokens/s"
        line = (
            f"{progress.elapsed_s:.0f} s: {progress.issued} sent, {progress.inflight} in flight, "
            f"{progress.ok} ok, {progress.failed} failed{latest}"
        )
        if self._live is None:
            print(line, file=sys.stderr, flush=True)
            return
        self._live.start()
        self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)

    def close(self) -> None:
        """Write pending lines, close the file and leave the progress line in place."""
        self._stop_live()
        self._flush()
        if self._file is not None:
            self._file.close()
        self._stream = None

    def _flush(self) -> None:
        data, self._lines = self._lines, bytearray()
        stream = self._stream
        if stream is None or not data:
            return
        try:
            write_all(stream, data)
            self._written += len(data)
        except OSError as error:
            self._stream = None
            if self._file is not None:
                with contextlib.suppress(OSError):  # a pipe or a device
                    self._file.truncate(self._written)
            self.problem = f"{self._path}: {error.strerror}; earlier lines were written"
            self._stop_live()
            print(f"error: {self.problem}; the run goes on", file=sys.stderr)

    def _stop_live(self) -> None:
        if self._live is not None:
            self._live.stop()
