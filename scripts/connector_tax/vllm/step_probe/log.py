# CONNECTOR_TAX_PATCH
"""Hold one process's timings in memory and write them to its file outside the step's path."""

import contextlib
import itertools
import json
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from multiprocessing.util import Finalize  # noqa: TID251 (pickles nothing)

HELD_NUMBERS = 16384

# Timings of every step, by position, with the values that follow start and end:
# scheduler: 0 schedule (step id, COUNTS), 1 update (step id), 2 engine step;
# worker: 0 execute_model (step id; 1, or 0 where sample_tokens() follows and ends the step), 1
# sample_tokens;
# device (emulated): 0 a step from its queueing to its end (device_time.clock:Step);
# copies (of its link): 0 a copy from its submission to its end (device_time.copies:Copy).
COUNTS = ("num_running", "num_waiting", "prefill_tokens", "decode_tokens")
# Hooks follow.
FIRST_HOOK = 3


def mark(position: int) -> float:
    """Return the number that encodes a position; unlike times and values it is negative."""
    return float(-1 - position)


@contextlib.contextmanager
def socket_address(path: str) -> Iterator[str]:
    """Yield an address of at most 107 bytes for the Unix socket at `path`, which may be longer."""
    folder, name = os.path.split(path)
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{name}"
    finally:
        os.close(directory)


class Log:
    """One process's records, held in memory until they are written.

    Args:
        prefix: beginning of the paths of its file and its socket.
        process: scheduler, worker, device or copies.
        on_error: called with errors, which must not reach the engine's callers.
    """

    def __init__(self, prefix: str, process: str, on_error: Callable[[Exception], None]) -> None:
        self._prefix = f"{prefix}.{process}"
        self._process = process
        self._on_error = on_error
        # The scheduler's data-parallel rank, known at its first step.
        self.rank = 0
        # (None or the child's name, its hooks, the position of the first)
        self._groups: list[tuple[str | None, list[str], int]] = []
        self._next_hook = FIRST_HOOK
        self.numbers: list[float] = []
        # The first step writes, and so opens the file: vLLM may fork before.
        self.limit = 0
        self._descriptor = -1
        # Bytes that a full disk did not accept, so that numbers are never cut.
        self._unwritten = b""
        self._writing = threading.Lock()

    def add_hooks(self, child: str | None, names: list[str]) -> int:
        """Return the position of the first of these hooks; call it before the first step."""
        first = self._next_hook
        self._groups.append((child, names, first))
        self._next_hook += len(names)
        return first

    def add(self, numbers: tuple[float, ...]) -> None:
        """Add the numbers of one record, and write where enough is held; from any thread."""
        self.numbers.extend(numbers)
        if len(self.numbers) > self.limit:
            self.write()

    def write(self) -> None:
        """Write the held records; callable from any thread.

        Raises:
            OSError: the file cannot be created (it exists, or its folder does not) or written.
        """
        with self._writing:
            if self._descriptor < 0:
                self._open()
            numbers = self.numbers
            count = len(numbers)
            # Records added meanwhile follow these.
            self._unwritten += struct.pack(f"{count}d", *numbers[:count])
            del numbers[:count]
            while self._unwritten:
                self._unwritten = self._unwritten[os.write(self._descriptor, self._unwritten) :]

    def _open(self) -> None:
        """Create the file and the socket; if another worker or copying process has this name, take
        the next name.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        base = f"{self._prefix}{self.rank + 1}" if self.rank else self._prefix
        for further in itertools.count(2):
            try:
                self._descriptor = os.open(f"{base}.steps", flags, 0o644)
                break
            except FileExistsError:
                if self._process not in ("worker", "copies"):
                    raise
                base = f"{self._prefix}{further}"
        self.limit = HELD_NUMBERS
        header = {"process": self._process, "groups": self._groups}
        self._unwritten = json.dumps(header).encode() + b"\n"
        server = socket.socket(socket.AF_UNIX)
        with socket_address(f"{base}.socket") as address:
            server.bind(address)
        server.listen()
        threading.Thread(target=self._serve, args=(server,), name="step-probe", daemon=True).start()
        # atexit does not reach a process that multiprocessing has forked.
        Finalize(None, self._write_at_the_end, exitpriority=0)

    def _serve(self, server: socket.socket) -> None:
        try:
            while True:
                peer, _ = server.accept()
                # The requesting process may have ended before the reply.
                with peer, contextlib.suppress(ConnectionError):
                    while order := peer.recv(1):
                        self.write()
                        peer.sendall(order)
        except Exception as error:
            self._on_error(error)

    def _write_at_the_end(self) -> None:
        try:
            self.write()
        except OSError as error:
            self._on_error(error)
