"""Stub."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class AffinityPlan:
    loadgen: tuple[int, ...]
    workers: tuple[tuple[int, ...], ...]
    server: tuple[int, ...]
    enabled: bool = True

    def describe(self) -> dict[str, Any]:
        return {}
