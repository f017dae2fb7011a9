"""The figures of the study, in order; each is a module of this package and a file name."""

NAMES = (
    "fig1_ttft_vs_rate",
    "fig2_tpot_vs_rate",
    "fig3_throughput",
    "fig4_tax_bars",
    "fig5_shape_heatmap",
    "fig6_step_cdf",
    "fig7_decomposition",
    "fig8_additivity",
    "fig9_forest",
    "fig10_resources",
)
