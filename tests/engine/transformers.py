"""Transformers for the tests of the batched service; importable by its worker process."""

import math
import os
import signal
import time
from typing import Any

from connector_tax.engine.transformer import VectorTransformer, pack


class Squares(VectorTransformer):
    """A transformer that squares, with a pause that grows slowly with the batch."""

    def __init__(self, pause_s: float = 0.0) -> None:
        self._pause_s = pause_s

    def transform(self, prepared: list[int]) -> list[int]:
        time.sleep(self._pause_s * math.log(len(prepared) + 1))
        return [x * x for x in prepared]


class Stages(VectorTransformer):
    """A transformer whose stages mark the result, and raise on request."""

    def preprocess(self, batch: list[str]) -> list[str]:
        _raise_if("worker-pre", batch)
        return [f"{x}<" for x in batch]

    def transform(self, prepared: list[str]) -> list[str]:
        _raise_if("transform", prepared)
        return [f"{x}T" for x in prepared]

    def postprocess(self, prepared: Any, transformed: Any) -> list[Any]:
        _raise_if("worker-post", prepared)
        return [f"{x}>" for x in transformed]


def _raise_if(mark: str, batch: list[str]) -> None:
    if any(mark in x for x in batch):
        raise RuntimeError(f"{mark} raised")


class BatchSizes(VectorTransformer):
    """A transformer that returns the size of the batch."""

    def transform(self, prepared: list[Any]) -> list[int]:
        return [len(prepared)] * len(prepared)


class Gated(VectorTransformer):
    """A transformer that answers one batch for each byte read from a FIFO; element -1 kills it."""

    def __init__(self, gate: str) -> None:
        # Read and write, so that a byte written before it is waited for is not lost.
        self._gate = os.open(gate, os.O_RDWR)

    def transform(self, prepared: list[int]) -> list[int]:
        if -1 in prepared:
            os.kill(os.getpid(), signal.SIGKILL)
        os.read(self._gate, 1)
        return [len(prepared)] * len(prepared)


class FailsToBuild(Squares):
    """A transformer whose constructor raises."""

    def __init__(self) -> None:
        raise OSError("no such weights")


class DiesWhenBuilt(Squares):
    """A transformer that ends its process in the constructor."""

    def __init__(self) -> None:
        os._exit(3)


class Stubborn(Squares):
    """A transformer that does not end when its connection closes."""

    def run(self, connection: Any) -> None:
        connection.sendall(pack(["ready"]))
        while True:
            signal.pause()


class WrongCount(VectorTransformer):
    """A transformer that returns one result too few."""

    def transform(self, prepared: list[Any]) -> list[Any]:
        return prepared[1:]


class Troubled(VectorTransformer):
    """A transformer whose results cannot be sent, or whose errors have unusable texts."""

    def transform(self, prepared: list[Any]) -> list[Any]:
        if "surrogate" in prepared:
            raise ValueError("\udcff")
        if "textless" in prepared:
            raise Textless
        made = {"bad": object(), "huge": 1 << 80}
        return [made.get(x, x) for x in prepared]


class Textless(Exception):
    """An error without a text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class NeverReady(Squares):
    """A transformer whose constructor does not return."""

    def __init__(self) -> None:
        signal.pause()
