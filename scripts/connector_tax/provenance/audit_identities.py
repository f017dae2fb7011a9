"""Claims that two independent records of one cell agree: what the client, the server and the step
records each say of the same requests.

Prefill and decode tokens of the steps are the server's token counters; the server's own histograms
of TTFT and E2E bound the client's, which also hold the way to the server and back.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

from connector_tax.provenance.audit_study import RawCell, RawStudy
from connector_tax.provenance.recompute import Row

HISTOGRAMS = {
    "TTFT": ("vllm:time_to_first_token_seconds", "t_first_token_ns"),
    "E2E": ("vllm:e2e_request_latency_seconds", "t_last_token_ns"),
}
# Wall and monotonic clock may run apart by 500 ppm while one of them is slewed.
CLOCKS = 1e-3
SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def identities(study: RawStudy, cell: RawCell, deltas: Mapping[str, float | None]) -> Iterator[str]:
    """What a valid cell's records say against each other.

    Args:
        deltas: growth of the server's counters over the cell; None: not known.
    """
    missing = [name for name, delta in deltas.items() if delta is None]
    if missing:
        yield f"the server's counters lack {', '.join(missing)}"
        return
    undisturbed = all(r["status"] in ("ok", "dropped") for r in cell.requests)
    if study.step_timing:
        yield from _tokens(cell, deltas, exact=undisturbed and deltas["preemptions"] == 0)
    texts = []
    for moment, scrape in (("before", cell.metrics[0]), ("after", cell.metrics[-1])):
        if "raw" not in scrape:
            yield f"the scrape {moment} the cell holds no text"
            return
        texts.append(samples(scrape["raw"]))
        yield from _same_values(moment, texts[-1], scrape["values"])
    ok = [r for r in cell.requests if r["status"] == "ok"]
    for name, (metric, last) in HISTOGRAMS.items():
        seconds = [(r[last] - r["t_send_ns"]) / 1e9 for r in ok]
        yield from _bounded(name, metric, texts, seconds, exact=undisturbed)


def _tokens(cell: RawCell, deltas: Mapping[str, float | None], *, exact: bool) -> Iterator[str]:
    steps = [r for r in cell.steps() if r["process"] == "scheduler"]
    prompt, generated, success = (
        deltas[name] or 0 for name in ("prompt_tokens", "generation_tokens", "success")
    )
    # A request's first token is of the step that ends its prefill.
    counted = {"prefill_tokens": prompt, "decode_tokens": generated - success}
    if not exact:
        ok = [r for r in cell.requests if r["status"] == "ok"]
        counted = {
            "prefill_tokens": sum(r["prompt_tokens"] for r in ok),
            "decode_tokens": sum(r["completion_tokens"] - 1 for r in ok),
        }
    for name, wanted in counted.items():
        total = sum(r[name] for r in steps)
        if total < wanted or (exact and total != wanted):
            least = "" if exact else "at least "
            yield f"{name} of the steps add up to {total}, the counters say {least}{wanted:g}"


def samples(text: str) -> dict[tuple[str, str], float]:
    """(name, labels sorted as one text) to value of a Prometheus page."""
    return {
        (name, ",".join(f'{k}="{v}"' for k, v in sorted(LABEL.findall(labels)))): float(value)
        for name, labels, value in SAMPLE.findall(text)
    }


def _same_values(
    moment: str, text: Mapping[tuple[str, str], float], values: Mapping[str, float]
) -> Iterator[str]:
    shown = {f"{name}{{{labels}}}" if labels else name: v for (name, labels), v in text.items()}
    for key, value in values.items():
        if key.startswith("vllm:") and shown.get(key) != value:
            told = f"{value:g} in the scrape {moment} the cell, its text says {shown.get(key)}"
            yield f"{key}: {told}"


def _bounded(
    name: str,
    metric: str,
    texts: Sequence[Mapping[tuple[str, str], float]],
    seconds: Sequence[float],
    *,
    exact: bool,
) -> Iterator[str]:
    """No client is faster than its server: in each bucket, and in sum where all were served."""
    before, after = (_histogram(text, metric) for text in texts)
    if not after["le"] or before["le"].keys() != after["le"].keys():
        yield f"{metric} is missing"
        return
    for bound, count in after["le"].items():
        served = count - before["le"][bound]
        seen = sum(s * (1 + CLOCKS) <= bound for s in seconds)
        if seen > served:
            yield (
                f"{name}: {seen} requests took at most {bound:g} s at the client, only {served:g} "
                "at the server: no client is faster than its server"
            )
            return
    took, grown = sum(seconds), after["sum"] - before["sum"]
    if exact and took * (1 + CLOCKS) < grown:
        yield (
            f"{name}: {took:.4f} s in sum at the client, {grown:.4f} s at the server: no client is "
            "faster than its server"
        )


def _histogram(text: Mapping[tuple[str, str], float], metric: str) -> Row:
    buckets: dict[float, float] = {}
    total = 0.0
    for (name, labels), value in text.items():
        if name == f"{metric}_bucket":
            bound = float(dict(LABEL.findall(labels))["le"])
            buckets[bound] = buckets.get(bound, 0.0) + value
        elif name == f"{metric}_sum":
            total += value
    return {"le": buckets, "sum": total}
