"""The worker process of the batched service, which applies a vectorized transformer to batches.

The worker is a separate interpreter; msgpack frames pass over a socket pair, so that nothing is
unpickled and nothing polls.

    to the worker     first {"class": ..., "kwargs": {...}}, then one frame for each batch from the
        worker   first ["ready"] or an error, then one frame for each batch, in order: ["ok",
        results] or ["error", type, message, traceback]
"""

import contextlib
import importlib
import os
import socket
import struct
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import msgspec

from connector_tax.linux import die_with_parent, ignore_warning

HEADER = struct.Struct("<I")
_CHUNK = 1 << 16


class VectorTransformer(ABC):
    """The vectorized model, which lives in the worker process and processes one batch at a time.

    Subclasses take plain values (numbers, strings, lists, maps) in `__init__` and override
    `transform`, which returns as many results as the batch has elements, in the same order. An
    exception in any of the three methods, or a result that msgpack cannot carry, fails the batch.
    """

    def preprocess(self, batch: list[Any]) -> Any:
        """Prepare a message of the main process for `transform`."""
        return batch

    @abstractmethod
    def transform(self, prepared: Any) -> Any:
        """Compute the whole batch at once."""

    def postprocess(self, prepared: Any, transformed: Any) -> list[Any]:
        """Return the results to send back, from the outputs of the other two methods."""
        del prepared
        result: list[Any] = transformed
        return result

    def run(self, connection: socket.socket) -> None:
        """Report ready, then answer batches in order until the main process closes its end."""
        connection.sendall(pack(["ready"]))
        # The main process may close its end while a batch is being computed.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for body in _frames(connection):
                connection.sendall(self._answer(body))

    def _answer(self, body: bytes) -> bytes:
        try:
            batch = unpack(body)
            prepared = self.preprocess(batch)
            results = list(self.postprocess(prepared, self.transform(prepared)))
            if len(results) != len(batch):
                raise ValueError(f"{len(results)} results for a batch of {len(batch)}")
            return pack(["ok", results])
        except Exception as error:
            return pack(_error(error))


def pack(value: Any) -> bytes:
    """Return one frame: the length of the msgpack body (4 bytes, little-endian), then the body.

    Raises:
        TypeError: msgpack cannot carry `value`.
    """
    body = msgspec.msgpack.encode(value)
    return HEADER.pack(len(body)) + body


def unpack(body: bytes) -> Any:
    """Return the value in a frame's body.

    Raises:
        msgspec.DecodeError: the body is not msgpack.
    """
    return msgspec.msgpack.decode(body, strict=False)


def split_frames(buffer: bytearray) -> Iterator[bytes]:
    """Remove every complete frame from the front of `buffer` and yield its body."""
    while len(buffer) >= HEADER.size:
        end = HEADER.size + HEADER.unpack_from(buffer)[0]
        if len(buffer) < end:
            return
        body = bytes(buffer[HEADER.size : end])
        del buffer[:end]
        yield body


def class_path(worker_class: type[VectorTransformer]) -> str:
    """Return `module:qualified.name` under which a worker process can import `worker_class`.

    Raises:
        ValueError: the class is local to a function, or defined in a script without a module name.
    """
    module = worker_class.__module__
    if module == "__main__":
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        module = spec.name if spec is not None else ""
    if not module or "<locals>" in worker_class.__qualname__:
        raise ValueError(
            f"worker_class: {worker_class!r} cannot be imported by the worker process; "
            "define it at the top level of a module"
        )
    return f"{module}:{worker_class.__qualname__}"


def _error(error: Exception) -> list[str]:
    """Return an exception's type, text and traceback, as msgpack can carry them."""
    report = traceback.TracebackException.from_exception(error)
    texts = ("error", type(error).__name__, str(report), "".join(report.format()))
    return [text.encode("utf-8", "backslashreplace").decode() for text in texts]


def _frames(connection: socket.socket) -> Iterator[bytes]:
    buffer = bytearray()
    while chunk := connection.recv(_CHUNK):
        buffer += chunk
        yield from split_frames(buffer)


def _import_class(path: str) -> type[VectorTransformer]:
    module, _, qualified = path.partition(":")
    target: Any = importlib.import_module(module)
    for name in qualified.split("."):
        target = getattr(target, name)
    if not (isinstance(target, type) and issubclass(target, VectorTransformer)):
        raise TypeError(f"{path} is not a VectorTransformer")
    return target


def main() -> None:
    """Run the worker process; arguments are the socket's descriptor and the parent's pid."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(parent)
    ignore_warning()
    os.set_inheritable(descriptor, False)
    with socket.socket(fileno=descriptor) as connection:
        try:
            first = unpack(next(_frames(connection)))
            transformer = _import_class(first["class"])(**first["kwargs"])
        except StopIteration:
            return
        except Exception as error:
            connection.sendall(pack(_error(error)))
            return
        transformer.run(connection)
