"""Memory of the load generator's main process over a long run of the command, records and all.

    python -m benchmarks.memory

What workers and server would do is made up at once: every request succeeds, and each of its tokens
comes in a read of its own, 10 ms apart. All else is the command itself, from its arguments to the
summary and the file of records, which goes to /dev/null. A worker keeps nothing of a request that
has ended, so the peak of one that really streams, at the end, does not grow with the run.
"""

import argparse
from array import array
from collections.abc import Callable, Iterable

from connector_tax.loadgen import __main__ as command
from connector_tax.loadgen import generator
from connector_tax.loadgen.messages import Begin, Begun, FromRun, Health, Item, RequestRecord
from connector_tax.loadgen.worker import peak_memory_mb
from connector_tax.machine import machine

GAP_NS = 10_000_000


class Answers:
    """In place of the dispatcher and its workers: answers each request as soon as it is due."""

    tokens = 0

    def __init__(self, *_: object) -> None:
        self.died: list[int] = []
        self.pids: list[int] = []

    def start(self) -> None:
        """Nothing is to be started."""

    close = start

    def begin(self, begin: Begin, on_done: Callable[[FromRun], None], _: object) -> list[Begun]:
        """A worker is there, with all its connections."""
        self._on_done = on_done
        return [Begun(0, begin.connections, None, "kernel")]

    def submit(self, items: Iterable[Item]) -> None:
        """Answer all that is handed over."""
        for item in items:
            if isinstance(item, tuple):
                self._on_done(self._answered(item[0]))

    def _answered(self, record: RequestRecord) -> RequestRecord:
        due_ns = record.t_intended_ns
        first_ns = due_ns + 20_000_000
        stamps = range(first_ns, first_ns + GAP_NS * self.tokens, GAP_NS)
        record.t_worker_ns = record.t_conn_ns = record.t_send_ns = due_ns + 10_000
        record.t_headers_ns = record.t_first_token_ns = record.t_first_answer_ns = stamps[0]
        record.t_last_token_ns = record.t_done_ns = stamps[-1]
        record.prompt_tokens, record.completion_tokens = record.wanted[0], self.tokens
        record.counted_by, record.first_read_tokens = "server", 1
        record.inflight_at_send, record.worker = 0, 0
        reads = array("q", bytes(16 * self.tokens))
        reads[::2], reads[1::2] = array("q", stamps), array("q", [1] * self.tokens)
        record.raw_reads = reads.tobytes()
        return record

    def end(self) -> list[Health]:
        """The health of a worker that has had nothing to do."""
        return [Health(0, self.values() | {"reads": 1, "unstamped_reads": 0})]

    def values(self) -> dict[str, float]:
        """Counters, all zero."""
        names = ("loop_lag_p99_ms", "loop_lag_max_ms", "cpu_share", "undecodable", "oversized")
        return dict.fromkeys((*names, "dropped_messages", "late_results"), 0.0)


def main() -> int:
    """Print the peak; exit status 1 if it is above --most-mb."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=256, help="of each answer")
    parser.add_argument("--rate", type=float, default=2000.0, help="requests a second")
    parser.add_argument("--most-mb", type=float, default=400.0)
    options = parser.parse_args()
    Answers.tokens = options.tokens
    setattr(generator, "Dispatcher", Answers)  # noqa: B010
    before_mb = peak_memory_mb()
    status = command.main(
        [
            *("--url", "http://127.0.0.1:9", "--model", "m", "--no-ready-check"),
            *("--rate", f"{options.rate}", "--requests", f"{options.requests}"),
            *("--prompt-tokens", "8", "--max-tokens", f"{options.tokens}", "--ignore-eos"),
            *("--summary", "/dev/null", "--output", "/dev/null"),
        ]
    )
    peak_mb = peak_memory_mb()
    print(machine())
    print(
        f"{options.requests:,} requests of {options.tokens} tokens: exit status {status}, "
        f"peak {peak_mb:.0f} MB, {before_mb:.0f} of them before the run"
    )
    return int(status not in (0, 1) or peak_mb > options.most_mb)


if __name__ == "__main__":
    raise SystemExit(main())
