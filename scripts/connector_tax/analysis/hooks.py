"""The connector's hooks in the steps of one cell: which ran, how often, and how long.

Source: docs/method.md, "Steps". The design's three callbacks stand in fields of their own of a step
record; the step probe adds the connector's other hooks (`hooks_us`) and those timed of a
MultiConnector's children (`children_us`), by the names of their methods.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import polars as pl
from numpy.typing import NDArray

from connector_tax.files import ArtifactError

CALLBACKS = ("build_meta_us", "get_finished_us", "start_load_kv_us")

Floats = NDArray[np.float64]
_Microseconds = Annotated[float, msgspec.Meta(ge=0)]
# Hooks with a field of their own in the step records, by the name that children_us has for them: as
# in connector_tax.vllm.step_probe, which an archive is replotted without.
FIELDS = {
    "build_connector_meta": "build_meta_us",
    "get_finished": "get_finished_us",
    "get_transfer_results": "get_finished_us",
    "start_load_kv": "start_load_kv_us",
}
_OWN = msgspec.json.Decoder(dict[str, _Microseconds])
_CHILDREN = msgspec.json.Decoder(dict[str, dict[str, _Microseconds]])
_CALL = {
    "step_id": pl.Int64(),
    "process": pl.String(),
    "child": pl.String(),
    "hook": pl.String(),
    "us": pl.Float64(),
}
_HOOK = ("process", "child", "hook")


class Hook(NamedTuple):
    """A timed hook: the process it runs in, the connector it belongs to, its name.

    `child` is empty for the configured connector itself, and the name of the child for one of a
    MultiConnector's. The three callbacks have the names of the design's fields, without the unit.
    """

    process: str
    child: str
    name: str


def hook_calls(path: Path, frame: pl.DataFrame) -> pl.DataFrame:
    """Every hook of every step record: columns step_id, process, child, hook, us.

    Args:
        path: the file the records are from, for errors.
        frame: step records with `hooks_us` and `children_us` as JSON text.

    Raises:
        ArtifactError: a `hooks_us` or `children_us` is not an object of times in us, 0 or more.
    """
    records = frame.select("step_id", "process")
    callbacks = [
        records.with_columns(
            child=pl.lit(""), hook=pl.lit(_callback(column)), us=frame[column]
        ).drop_nulls("us")
        for column in CALLBACKS
    ]
    others = pl.DataFrame(list(_others(path, frame)), schema=_CALL, orient="row")
    return pl.concat([*callbacks, others])


def hook_times(calls: pl.DataFrame, steps: pl.Series) -> dict[Hook, Floats]:
    """The time of each hook in each of the steps, 0 where it did not run, in their names' order.

    Args:
        calls: of the whole cell.
        steps: ids of the steps in the window that scheduled tokens.
    """
    # One record per tensor-parallel rank: the slowest rank holds the step up.
    per_step = calls.group_by(*_HOOK, "step_id").agg(pl.col("us").max())
    places = steps.to_frame().with_row_index("place")
    times: dict[Hook, Floats] = {}
    ran = per_step.join(places, on="step_id").sort(*_HOOK)
    for key, own in ran.group_by(*_HOOK, maintain_order=True):
        times[Hook(*map(str, key))] = us = np.zeros(len(steps))
        us[own["place"].to_numpy()] = own["us"].to_numpy()
    return times


def _callback(column: str) -> str:
    return column.removesuffix("_us")


def _others(path: Path, frame: pl.DataFrame) -> Iterator[tuple[int, str, str, str, float]]:
    wanted = frame.filter(pl.col("hooks_us").is_not_null() | pl.col("children_us").is_not_null())
    for step_id, process, own, children in wanted.select(
        "step_id", "process", "hooks_us", "children_us"
    ).iter_rows():
        try:
            by_child = {"": _OWN.decode(own)} if own is not None else {}
            by_child |= _CHILDREN.decode(children) if children is not None else {}
        except msgspec.DecodeError as error:
            raise ArtifactError(
                f"{path}: step_id {step_id}, {process}: hooks_us or children_us: {error};"
                " allowed: hook names (children_us: by child) with times in us"
            ) from None
        for child, times in by_child.items():
            for hook, us in _by_design(times).items():
                yield step_id, process, child, hook, us


def _by_design(times: Mapping[str, float]) -> dict[str, float]:
    """The hooks with the callbacks under their fields' names: a child has its methods' names."""
    named: dict[str, float] = {}
    for name, us in times.items():
        hook = _callback(FIELDS[name]) if name in FIELDS else name
        named[hook] = named.get(hook, 0.0) + us
    return named
