"""Figure 2: TPOT p90 against the offered rate, and its tax (Phase A)."""

from functools import partial

from connector_tax.figures.rates import latency_figure

draw = partial(latency_figure, metric="tpot_p90")
