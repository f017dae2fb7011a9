"""Figure 1: TTFT p90 against the offered rate, and its tax (Phase A)."""

from functools import partial

from connector_tax.figures.rates import latency_figure

draw = partial(latency_figure, metric="ttft_p90")
