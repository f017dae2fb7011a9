"""Print the summary of a run."""

from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console

from connector_tax.foreign import printable
from connector_tax.loadgen.checks import ADVICE, WRONG
from connector_tax.loadgen.messages import FAILURES, TOLERATED
from connector_tax.loadgen.sweep import sweep_table, verdict
from connector_tax.loadgen.table import latency_table

Summary = Mapping[str, Any]
"""The dictionary that `loadgen/summary.py:summarise` returns, with configuration and notes."""
SHARED_FIRST_MAX = 0.01


def print_summary(summary: Summary, stream: TextIO) -> None:
    """Print the results of one load."""
    console = _console(stream)
    remarks = [f"note: {note}" for note in notes(summary)]
    for line in [*headlines(summary), *failures(summary), *remarks]:
        console.print(printable(line))
    if summary["latency_ms"]:
        console.print("latency of successes")
        console.print(latency_table(summary["latency_ms"], summary["configuration"]["percentiles"]))
    for line in check_lines(summary):
        console.print(printable(line))


def print_sweep(summaries: Sequence[Summary], stream: TextIO) -> None:
    """Print a row for each rate, the highest sustained rate, and the problems at each rate."""
    console = _console(stream)
    console.print(sweep_table(summaries))
    console.print(verdict(summaries))
    seen: set[str] = set()
    for summary in summaries:
        lines = failures(summary) + [f"note: {note}" for note in notes(summary)]
        passed, *failed = check_lines(summary)
        new = [line for line in [*lines, *failed] if line not in seen]
        seen |= {*new}
        if new:
            console.print(f"at rate {summary['configuration']['rate']:g} ({passed}):")
        for line in new:
            console.print(printable(f"  {line}"))


def _console(stream: TextIO) -> Console:
    # Elsewhere than in a terminal, lines are not wrapped: programs read them.
    return Console(file=stream, highlight=False, markup=False, soft_wrap=not stream.isatty())


def headlines(summary: Summary) -> list[str]:
    """Return lines with counts, throughput, lengths, finish reasons and goodput."""
    lines = [
        f"{summary['requests']} requests in {summary['window_s']:.1f} s, {summary['ok']} ok; "
        f"{summary['requests_per_s']:.2f} requests/s and "
        f"{summary['tokens_per_s']:.1f} tokens/s in this time"
    ]
    for name, lengths in summary["lengths"].items():
        if lengths is not None:
            rate = f", {summary['input_tokens_per_s']:.1f} tokens/s" if name == "input" else ""
            lines.append(
                f"{name} tokens: mean {lengths['mean']:.1f}, p50 {lengths['p50']:g}, "
                f"p90 {lengths['p90']:g}{rate}"
            )
    if summary["finish_reasons"]:
        reasons = ", ".join(f"{count} {name}" for name, count in summary["finish_reasons"].items())
        lines.append(f"finish reasons: {reasons}")
    if (goodput := summary["goodput"]) is not None:
        limits = ", ".join(f"{name} {limit:g} ms" for name, limit in goodput["slo_ms"].items())
        share = "-" if goodput["share"] is None else f"{100 * goodput['share']:.1f}%"
        lines.append(
            f"goodput within {limits}: {goodput['requests_per_s']:.2f} requests/s, {share} of all"
        )
    return lines


def failures(summary: Summary) -> list[str]:
    """Return a line for each kind of failure, each followed by its most frequent texts."""
    lines = []
    for kind, failed in summary["failed"].items():
        remedy = "; --finish-reason NAME accepts NAME" if kind == "bad_finish" else ""
        lines.append(f"  {failed['count']} {kind}: {FAILURES[kind][1]}{remedy}")
        texts = failed["texts"]
        lines += [f"      {count} x {text}" for text, count in texts.items()]
        if texts and (others := failed["count"] - sum(texts.values())):
            lines.append(f"      {others} x other texts")
    return lines


def check_lines(summary: Summary) -> list[str]:
    """Return how many checks passed, and two lines for each failed check."""
    checks = summary["checks"]
    lines = [f"{sum(check['passed'] for check in checks)} of {len(checks)} checks pass"]
    for check in checks:
        name, value = check["name"], check["value"]
        if value is None:
            lines.append(f"FAIL {name}: no data")
        elif not check["passed"]:
            lines.append(f"FAIL {name} is {value:.4g}, allowed {check['bound']}: {WRONG[name]}")
            lines.append(f"     {ADVICE[name]}")
    return lines


def notes(summary: Summary) -> list[str]:
    """Return notes on how to read the numbers."""
    ok, shared = summary["ok"], summary["first_token_shared"]
    lines = [f"{count} of {ok}: {TOLERATED[name]}" for name, count in summary["tolerated"].items()]
    if summary["counted_by_client"]:
        without = f"{summary['counted_by_client']} of {ok} have no usage"
        lines.append(
            f"{without}, so tokens are counted by events: too few if two tokens share an event, "
            "one too many if the last event holds no token"
            if not summary["configuration"]["no_stream"]
            else f"{without}: their tokens are not known"
        )
    if shared > SHARED_FIRST_MAX * ok:
        lines.append(
            f"{shared} of {ok}: the first read brought several tokens, so TTFT is a later "
            "token's (the server sends several together, a proxy buffers the stream, or this "
            "machine reads too late)"
        )
    timed = summary["latency_ms"].get("TPOT", {"n": 0})["n"]
    if ok > timed and not summary["configuration"]["no_stream"]:
        lines.append(
            f"{ok - timed} of {ok} have no TPOT: they had one token, or all tokens in one read"
        )
    lines += _token_notes(summary)
    if summary["paused"] and summary["configuration"]["concurrency"] is not None:
        lines.append(
            f"{summary['paused']} failures paused their place in the closed loop, for 1 s or as "
            "Retry-After requests: fewer requests were in flight than --concurrency"
        )
    if summary["retried"]:
        lines.append(f"{summary['retried']} were retried, since a pooled connection was closed")
    if summary["waited_for_connection"]:
        lines.append(f"{summary['waited_for_connection']} waited for a connection (--connections)")
    return [*lines, *summary["notes"]]


def _token_notes(summary: Summary) -> list[str]:
    """Return notes on unusual token counts and their effect on the latencies."""
    ok, configuration, notes = summary["ok"], summary["configuration"], []
    factor = summary["tokens_per_event"]
    if factor is not None and factor > 1 + SHARED_FIRST_MAX and summary["bundled"]:
        notes.append(
            f"an event brought {factor:.2f} tokens on average (speculative decoding, a server that "
            "batches its stream, or characters of several tokens): ITL is the time between reads, "
            "and TPOT is too low by up to this factor in answers of few events"
        )
    missing = summary["latency_missing"]
    if not configuration["no_stream"] and (count := missing.get("TTFT")):
        notes.append(f"{count} of {ok} brought no token: they have no TTFT")
    if cached := summary["cached_tokens"]:
        notes.append(
            f"{cached} prompt tokens were in the server's cache: TTFT is lower than without cache"
        )
    output, max_tokens = summary["lengths"]["output"], configuration["max_tokens"]
    with_lengths = ("session_file", "prompts", "trace")
    fixed = not any(configuration[name] for name in with_lengths) and not (
        {"max_tokens", "max_completion_tokens"} & configuration["body"].keys()
    )
    if output is not None and fixed and output["mean"] != max_tokens:
        notes.append(
            f"answers have {output['mean']:.1f} tokens on average, not --max-tokens {max_tokens}"
            + ("" if configuration["ignore_eos"] else " (--ignore-eos fixes their length)")
        )
    if (goodput := summary["goodput"]) is not None:
        for name, count in goodput["not_measured"].items():
            notes.append(f"{count} of {ok} have no {name} and are not counted as good")
    return notes
