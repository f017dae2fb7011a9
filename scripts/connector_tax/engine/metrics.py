"""Render the page /metrics with the metric names of vLLM 0.32.

The text is built by hand because a scrape stalls the event loop that sends the tokens:
prometheus_client needs milliseconds for this page, this module a fraction of one.
"""

from bisect import bisect_left
from collections.abc import Mapping
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from connector_tax.engine.scheduler import Scheduler, SchedulerOptions, Sequence

_TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_TIME = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
_REQUEST_TIME = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_ITERATION = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_REASONS = ("stop", "length", "abort", "error")


class Histogram:
    """A histogram: counts of values by upper bound, and the sum of the values."""

    def __init__(self, name: str, text: str, bounds: tuple[float, ...]) -> None:
        self._name = f"vllm:{name}"
        self._text = text
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value` (in the unit of the name) `times` times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def render(self, labels: str) -> str:
        """Return the histogram in Prometheus's text format."""
        running = list(accumulate(self._counts))
        bounds = [*(repr(float(b)) for b in self._bounds), "+Inf"]
        name = self._name
        lines = [
            f'{name}_bucket{{{labels},le="{bound}"}} {count}.0'
            for bound, count in zip(bounds, running, strict=True)
        ]
        lines.append(f"{name}_count{{{labels}}} {running[-1]}.0")
        lines.append(f"{name}_sum{{{labels}}} {self._sum!r}")
        return _family(name, "histogram", self._text, lines)


class Series(NamedTuple):
    """A gauge or counter, with a value for each set of labels."""

    name: str
    kind: str
    text: str
    values: Mapping[str, float]


class Metrics:
    """The counters and histograms of one launch; gauges are passed at the scrape."""

    def __init__(self, model_name: str) -> None:
        escaped = model_name.replace("\\", "\\\\").replace('"', '\\"')
        self._labels = f'engine="0",model_name="{escaped}"'
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.extra_prefix_hits = 0
        self.finished = dict.fromkeys(_REASONS, 0)
        self.ttft = Histogram("time_to_first_token_seconds", "Time to first token.", _TTFT)
        self.inter_token = Histogram(
            "inter_token_latency_seconds", "Time between two tokens.", _TOKEN_TIME
        )
        self.time_per_token = Histogram(
            "request_time_per_output_token_seconds", "Mean time per output token.", _TOKEN_TIME
        )
        self.e2e = Histogram("e2e_request_latency_seconds", "End-to-end latency.", _REQUEST_TIME)
        self.queue = Histogram("request_queue_time_seconds", "Time waiting.", _REQUEST_TIME)
        self.prefill = Histogram("request_prefill_time_seconds", "Time in prefill.", _REQUEST_TIME)
        self.decode = Histogram("request_decode_time_seconds", "Time in decode.", _REQUEST_TIME)
        self.inference = Histogram("request_inference_time_seconds", "Time running.", _REQUEST_TIME)
        self.iteration = Histogram("iteration_tokens_total", "Tokens of a step.", _ITERATION)
        self.request_prompt = Histogram("request_prompt_tokens", "Prompt tokens.", _TOKENS)
        self.request_generation = Histogram("request_generation_tokens", "Generated.", _TOKENS)

    def count_finished(
        self,
        reason: str,
        sequence: Sequence,
        arrival_ns: int,
        admitted_ns: int,
        first_ns: int,
        last_ns: int,
    ) -> None:
        """Count a finished request."""
        self.finished[reason] += 1
        self.e2e.observe((last_ns - arrival_ns) / 1e9)
        self.queue.observe((admitted_ns - arrival_ns) / 1e9)
        self.prefill.observe((first_ns - admitted_ns) / 1e9)
        self.decode.observe((last_ns - first_ns) / 1e9)
        self.inference.observe((last_ns - admitted_ns) / 1e9)
        self.request_prompt.observe(sequence.prompt_len)
        self.request_generation.observe(sequence.generated)
        if sequence.generated > 1:
            span = (last_ns - first_ns) / 1e9
            self.time_per_token.observe(span / (sequence.generated - 1))

    def _series(self, scheduler: Scheduler) -> list[Series]:
        """Return every gauge and counter."""
        gauge, counter = "gauge", "counter"
        waiting, hits = len(scheduler.waiting), scheduler.prefix_hits + self.extra_prefix_hits
        scalars: list[tuple[str, str, str, float]] = [
            ("num_requests_running", gauge, "Requests in the running batch.", scheduler.running),
            ("num_requests_waiting", gauge, "Requests waiting.", waiting),
            ("kv_cache_usage_perc", gauge, "Share of the KV blocks in use.", scheduler.pool.usage),
            ("num_preemptions_total", counter, "Preemptions.", scheduler.preemptions),
            ("prefix_cache_queries_total", counter, "Tokens looked up.", scheduler.prefix_queries),
            ("prefix_cache_hits_total", counter, "Tokens found.", hits),
            ("external_prefix_cache_queries_total", counter, "External tokens looked up.", 0),
            ("external_prefix_cache_hits_total", counter, "External tokens found.", 0),
            ("prompt_tokens_total", counter, "Prefill tokens processed.", self.prompt_tokens),
            ("generation_tokens_total", counter, "Tokens generated.", self.generation_tokens),
        ]
        series = [
            Series(f"vllm:{name}", kind, text, {self._labels: value})
            for name, kind, text, value in scalars
        ]
        by_reason = {"capacity": waiting, "deferred": 0}
        sources = {
            "local_compute": self.prompt_tokens - hits,
            "local_cache_hit": hits,
            "external_kv_transfer": 0,
        }
        for name, kind, text, label, counts in (
            ("vllm:num_requests_waiting_by_reason", gauge, "Requests waiting, by reason.",
             "reason", by_reason),
            ("vllm:prompt_tokens_by_source_total", counter, "Prompt tokens by source.",
             "source", sources),
            ("vllm:request_success_total", counter, "Requests that ended.",
             "finished_reason", self.finished),
        ):  # fmt: skip
            values = {f'{self._labels},{label}="{of}"': n for of, n in counts.items()}
            series.append(Series(name, kind, text, values))
        return series

    def values(self, scheduler: Scheduler) -> dict[str, float]:
        """Return gauges and counters under the names of a scrape's record, with sorted labels."""
        return {
            f"{series.name}{{{_sorted(labels)}}}": float(value)
            for series in self._series(scheduler)
            for labels, value in series.values.items()
        }

    def render(self, scheduler: Scheduler, options: SchedulerOptions) -> bytes:
        """Return the text of the page /metrics."""
        parts = [
            _family(name, kind, text, [f"{name}{{{of}}} {float(n)!r}" for of, n in values.items()])
            for name, kind, text, values in self._series(scheduler)
        ]
        name = "vllm:cache_config_info"
        cache_config = {
            "block_size": options.kv_block_size,
            "enable_prefix_caching": options.enable_prefix_caching,
            "kv_cache_size_tokens": options.kv_blocks * options.kv_block_size,
            "num_gpu_blocks": options.kv_blocks,
        }
        labels = ",".join(f'{key}="{value}"' for key, value in cache_config.items())
        lines = [f'{name}{{engine="0",{labels}}} 1.0']
        parts.append(_family(name, "gauge", "Information of the KV cache.", lines))
        histograms = [h for h in vars(self).values() if isinstance(h, Histogram)]
        parts.extend(histogram.render(self._labels) for histogram in histograms)
        return "".join(parts).encode()


def _family(name: str, kind: str, text: str, lines: list[str]) -> str:
    return f"# HELP {name} {text}\n# TYPE {name} {kind}\n" + "\n".join(lines) + "\n"


@lru_cache(maxsize=256)
def _sorted(labels: str) -> str:
    """Return a label set sorted by name; none of its values may contain a comma."""
    return ",".join(sorted(labels.split(",")))
