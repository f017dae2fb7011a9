# From raw records to tables, figures and the page; two studies beside each other. Nothing is measured.

from connector_tax.figures.names import FIGURES, NAMES

FIGURE_FILES = expand(
    f"{RESULTS}/figures/{{figure}}.{{kind}}",
    figure=NAMES,
    kind=["png", "svg", "csv"],
)


rule aggregate:
    input:
        INDEXES,
        modules("analysis", "seeds.py", *SHARED),
        study=f"{RESULTS}/study.json",
        patch=f"{RESULTS}/patch/patch_status.json",
        rates=f"{RESULTS}/reference_rates.json",
    output:
        [
            report(
                f"{RESULTS}/{paths.ANALYSIS}/{name}",
                caption="../report/caption.rst",
                category="Tables",
                labels={"table": name},
            )
            for name in paths.ANALYSIS_FILES
        ],
        [f"{RESULTS}/{paths.ANALYSIS}/{name}" for name in paths.PARQUET_FILES],
    log:
        f"{RESULTS}/logs/aggregate.log",
    conda:
        CONDA
    shell:
        "python -m connector_tax.analysis.aggregate --study {input.study} 2>&1 | tee {log}"


# Every figure; Snakemake's default triggers draw it again.
rule figure:
    input:
        rules.aggregate.output,
        modules("figures", "marks.py", *SHARED),
        study=f"{RESULTS}/study.json",
        rates=f"{RESULTS}/reference_rates.json",
    output:
        report(
            f"{RESULTS}/figures/{{figure}}.png",
            caption="../report/caption.rst",
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


# One page that holds everything.
rule report_html:
    input:
        FIGURE_FILES,
        rules.aggregate.output,
        INDEXES,
        modules(
            "report",
            "figures",
            "analysis",
            "seeds.py",
            "marks.py",
            "seals.py",
            *SHARED,
        ),
        study=f"{RESULTS}/study.json",
        environment=f"{RESULTS}/environment.json",
        preflight=f"{RESULTS}/preflight/preflight_status.json",
        patch=f"{RESULTS}/patch/patch_status.json",
        rates=f"{RESULTS}/reference_rates.json",
    output:
        report(
            f"{RESULTS}/report.html",
            caption="../report/caption.rst",
            category="Page",
            labels={"page": "report"},
        ),
    log:
        f"{RESULTS}/logs/report.log",
    conda:
        CONDA
    shell:
        "python -m connector_tax.report --study {input.study} 2>&1 | tee {log}"


# `snakemake compare --config studies=A,B`, of studies or archives.
rule compare:
    log:
        "results/compare/compare.log",
    conda:
        CONDA
    params:
        studies=two_studies,
    shell:
        "python -m connector_tax.compare {params.studies:q} 2>&1 | tee {log}"
