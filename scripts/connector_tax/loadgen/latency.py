"""Compute the latencies of one request."""

from connector_tax.loadgen.messages import RequestRecord

LATENCIES = ("TTFT", "TTFA", "TPOT", "E2E")


def latencies_ms(record: RequestRecord) -> dict[str, float]:
    """Return the latencies of a success, in ms, from the intended send time.

    TTFT ends at the first token and TTFA at the first token that is not reasoning; a whole response
    has neither. TPOT = (last token - first token) / (tokens after the first read); it is missing
    where no token came after the first read.
    """
    due_ns, first_ns = record.t_intended_ns, record.t_first_token_ns
    last_ns = record.t_last_token_ns
    if record.status != "ok" or last_ns is None:
        return {}
    latencies = {"E2E": (last_ns - due_ns) / 1e6}
    if first_ns is None:
        return latencies
    latencies["TTFT"] = (first_ns - due_ns) / 1e6
    if record.t_first_answer_ns is not None:
        latencies["TTFA"] = (record.t_first_answer_ns - due_ns) / 1e6
    later_tokens = (record.completion_tokens or 0) - (record.first_read_tokens or 1)
    if later_tokens > 0 and last_ns > first_ns:
        latencies["TPOT"] = (last_ns - first_ns) / 1e6 / later_tokens
    return latencies


def latency_columns(record: RequestRecord) -> dict[str, float | None]:
    """Return `ttft_ms`, `ttfa_ms`, `tpot_ms` and `e2e_ms`; None for a missing latency."""
    latencies = latencies_ms(record)
    return {f"{name.lower()}_ms": latencies.get(name) for name in LATENCIES}
