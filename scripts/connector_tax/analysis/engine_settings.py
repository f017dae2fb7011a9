"""What else differs from the baseline: engine.csv, the settings the running engines resolved.

A connector can make vLLM choose another KV-cache layout or leave fewer blocks; then a tax is not of
the connector's code alone. A row for each configuration and setting, from the launches of Phase A.
"""

from collections.abc import Sequence
from typing import Any

from connector_tax.analysis.launch_records import NOT_RECORDED, LaunchRecords
from connector_tax.artifacts.tables import Row

VARIES = "differs between launches"

# Text of the value, where it was read, why it is not known.
Found = tuple[str | None, str | None, str | None]


def engine_rows(launches: Sequence[LaunchRecords], baseline: str) -> list[Row]:
    """One row for each configuration and setting; one without a setting where none was recorded.

    Args:
        launches: all planned launches of Phase A, in the study's order.
    """
    configurations = list(dict.fromkeys(r.configuration for r in launches))
    recorded = [r.settings for r in launches if r.settings is not None]
    settings = list(recorded[0]) if recorded else []
    rows: list[Row] = []
    for config in configurations:
        mine = [r for r in launches if r.configuration == config]
        if not any(r.settings for r in mine):
            reasons = dict.fromkeys(r.reason or NOT_RECORDED for r in mine)
            rows.append({"config": config, "reason": "; ".join(reasons)})
            continue
        own = [_row(launches, baseline, config, setting) for setting in settings]
        changed = [
            f"{r['setting']} {r['value']} ({baseline} {r['plain']})" for r in own if r["differs"]
        ]
        rows += [row | {"also_differs": "; ".join(changed) or None} for row in own]
    return rows


def _row(launches: Sequence[LaunchRecords], baseline: str, config: str, setting: str) -> Row:
    value, source, reason = _found(launches, config, setting)
    plain, _, _ = _found(launches, baseline, setting)
    return {
        "config": config,
        "setting": setting,
        "value": value,
        "plain": plain,
        "differs": None if value is None or plain is None else value != plain,
        "source": source,
        "reason": reason,
        "also_differs": None,
    }


def _found(launches: Sequence[LaunchRecords], config: str, setting: str) -> Found:
    """A configuration's value of a setting; all of its values where its launches do not agree."""
    known = [r.settings[setting] for r in launches if r.configuration == config and r.settings]
    values = sorted({_text(entry["value"]) for entry in known if entry["value"] is not None})
    sources = sorted({entry["source"] for entry in known if entry["source"] is not None})
    reasons = list(dict.fromkeys(entry["reason"] for entry in known if entry["reason"] is not None))
    if len(values) > 1:
        reasons.append(VARIES)
    return " | ".join(values) or None, ", ".join(sources) or None, "; ".join(reasons) or None


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
