# Eight figures of the design and one forest plot of all taxes; default triggers re-plot them.

FIGURES = [
    "fig1_ttft_vs_rate",
    "fig2_tpot_vs_rate",
    "fig3_throughput",
    "fig4_tax_bars",
    "fig5_shape_heatmap",
    "fig6_step_cdf",
    "fig7_decomposition",
    "fig8_additivity",
]
FIGURE_FILES = expand(
    f"{RESULTS}/figures/{{figure}}.{{kind}}", figure=FIGURES, kind=["png", "svg", "csv"]
)


rule figure:
    input:
        rules.aggregate.output,
        modules("figures"),
        study=f"{RESULTS}/study.json",
        rates=f"{RESULTS}/reference_rates.json",
    output:
        f"{RESULTS}/figures/{{figure}}.png",
        f"{RESULTS}/figures/{{figure}}.svg",
        f"{RESULTS}/figures/{{figure}}.csv",
    log:
        f"{RESULTS}/logs/{{figure}}.log",
    shell:
        "python -m connector_tax.figures {wildcards.figure:q} --study {input.study} 2>&1 | tee {log}"
