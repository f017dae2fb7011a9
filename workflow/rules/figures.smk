# Every figure; default triggers re-plot them.

from connector_tax.figures.names import FIGURES, figures_of

FIGURE_FILES = expand(
    f"{RESULTS}/figures/{{figure}}.{{kind}}",
    figure=figures_of(STUDY["config"]["engine"]),
    kind=["png", "svg", "csv"],
)


rule figure:
    input:
        rules.aggregate.output,
        modules("figures", "marks.py", *SHARED),
        study=f"{RESULTS}/study.json",
        rates=f"{RESULTS}/reference_rates.json",
    output:
        report(
            f"{RESULTS}/figures/{{figure}}.png",
            caption="../report/figure.rst",
            category="Figures",
            labels={"figure": "{figure}"},
        ),
        f"{RESULTS}/figures/{{figure}}.svg",
        f"{RESULTS}/figures/{{figure}}.csv",
    log:
        f"{RESULTS}/logs/{{figure}}.log",
    conda:
        CONDA
    params:
        caption=lambda wildcards: FIGURES[wildcards.figure].caption,
    shell:
        "python -m connector_tax.figures {wildcards.figure:q} --study {input.study} 2>&1 | tee {log}"
