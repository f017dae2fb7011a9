"""The example transformer: squares, with a pause that grows slowly with the batch."""

import math
import time

from connector_tax.engine.transformer import VectorTransformer


class Squares(VectorTransformer):
    """Squares a batch after `pause_s * ln(1 + batch size)` seconds."""

    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s

    def transform(self, prepared: list[int]) -> list[int]:
        """The squares."""
        if self._pause_s:
            time.sleep(self._pause_s * math.log(len(prepared) + 1))
        return [x * x for x in prepared]
