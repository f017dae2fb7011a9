"""What the step records of one cell say, a second time (docs/method.md, "Steps").

Nothing is shared with connector_tax.analysis.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pandas as pd

from connector_tax.provenance.distributions import Floats
from connector_tax.provenance.recompute import Row

CALLBACKS = ["build_meta_us", "get_finished_us", "start_load_kv_us"]
METHODS_OF = {
    "build_connector_meta": "build_meta",
    "get_finished": "get_finished",
    "get_transfer_results": "get_finished",
    "start_load_kv": "start_load_kv",
}

Hook = tuple[str, str, str]  # process, child, hook


class CellSteps:
    """The steps that began in the window and scheduled tokens, in us, and each hook's time in them.

    Args:
        records: the lines of the step log.
        window: the cell's window (CLOCK_MONOTONIC ns).
    """

    def __init__(self, records: Sequence[Row], window: Mapping[str, int]) -> None:
        names = ("process", "step_id", "t_ns", "prefill_tokens", "decode_tokens")
        times = {n: [r[n] for r in records] for n in ("step_duration_us", *CALLBACKS)}
        times["engine_step_us"] = [r.get("engine_step_us") for r in records]
        frame = pd.DataFrame({n: [r[n] for r in records] for n in names}).join(
            pd.DataFrame(times, dtype=float)
        )
        start, stop = window["t_warmup_end_ns"], window["t_stop_ns"]
        scheduler = frame[(frame.process == "scheduler") & (frame.t_ns >= start)]
        started = scheduler[scheduler.t_ns < stop].set_index("step_id")
        with_tokens = started.prefill_tokens + started.decode_tokens > 0
        busy = started[with_tokens]
        # Several ranks: the slowest holds the step up.
        workers = frame[frame.process == "worker"].groupby("step_id")[CALLBACKS].max()
        calls = busy[CALLBACKS].add(workers.reindex(busy.index), fill_value=0.0)
        total = calls.sum(axis=1, skipna=False).dropna()
        columns = [busy.step_duration_us, busy.engine_step_us, *(calls[n] for n in CALLBACKS)]
        self.samples: dict[str, Floats] = {str(c.name): c.dropna().to_numpy() for c in columns}
        self.samples["connector_total_us"] = total.to_numpy()
        self.n, self.n_empty = len(busy), len(started) - len(busy)
        self.n_incomplete = len(busy) - len(total)
        self._time_hooks(
            records, dict(zip(started.index.tolist(), with_tokens.tolist(), strict=True))
        )

    def _time_hooks(self, records: Sequence[Row], with_tokens: Mapping[int, bool]) -> None:
        slowest: dict[tuple[Hook, int], float] = {}
        for r in records:
            for child, name, us in _timed(r) if r["step_id"] in with_tokens else ():
                at = ((r["process"], child, name), r["step_id"])
                slowest[at] = max(slowest.get(at, 0.0), us)
        self.ran: dict[Hook, list[float]] = {}
        self.empty: dict[Hook, float] = {}
        for (hook, step_id), us in slowest.items():
            self.ran.setdefault(hook, [])
            if with_tokens[step_id]:
                self.ran[hook].append(us)
            else:
                self.empty[hook] = self.empty.get(hook, 0.0) + us

    def columns(self) -> Row:
        """p50 and p90 of every sample, and the counts."""
        return {
            f"{name}_p{percent}": float(np.percentile(values, percent)) if len(values) else None
            for name, values in self.samples.items()
            for percent in (50, 90)
        } | {
            "n_steps": self.n,
            "n_empty_steps": self.n_empty,
            "n_incomplete_steps": self.n_incomplete,
        }

    def values(self, is_plain: bool) -> dict[str, float]:
        """What a launch brings to each step tax; absent where it has no number."""
        samples = self.samples
        parts = {
            "tax_step_p50": samples["step_duration_us"],
            "tax_engine_step_p50": samples["engine_step_us"],
            "tax_callback_p50": np.zeros(self.n) if is_plain else samples["connector_total_us"],
        }
        medians = {name: float(np.median(v)) for name, v in parts.items() if len(v)}
        if "tax_step_p50" in medians and "tax_callback_p50" in medians:
            medians["unattributed"] = medians["tax_step_p50"] - medians["tax_callback_p50"]
        return medians

    def cost(self, hook: Hook) -> Row:
        """p50, mean, share and empty time of a hook per step, and how often it ran."""
        ran, engine = self.ran.get(hook, []), self.samples["engine_step_us"]
        mean = sum(ran) / self.n
        return {
            "p50": float(np.median(ran)) if ran else None,
            "mean": mean,
            "share": mean / float(np.mean(engine)) if len(engine) else None,
            "empty": self.empty.get(hook, 0.0) / self.n,
            "n_ran": len(ran),
        }


def _timed(record: Row) -> Iterator[tuple[str, str, float]]:
    """(child, hook, us) of a record: callbacks, other hooks, the children's, each name once."""
    for name in CALLBACKS:
        if record[name] is not None:
            yield "", name[: -len("_us")], record[name]
    groups = {"": record.get("hooks_us") or {}, **(record.get("children_us") or {})}
    for child, times in groups.items():
        merged: dict[str, float] = {}
        for name, us in times.items():
            hook = METHODS_OF.get(name, name)
            merged[hook] = merged.get(hook, 0.0) + us
        for hook, us in merged.items():
            yield child, hook, us
