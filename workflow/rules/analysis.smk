# One job turns raw records into tables, figures and the page; another compares studies. Nothing is measured.

from connector_tax.figures.names import CAPTIONS, NAMES

TABLE_FILES = [f"{RESULTS}/{paths.ANALYSIS}/{name}" for name in paths.ANALYSIS_FILES]
FIGURE_FILES = expand(
    f"{RESULTS}/figures/{{figure}}.{{kind}}", figure=NAMES, kind=["png", "svg"]
)
PAGE = f"{RESULTS}/report.html"


rule analyse:
    input:
        INDEXES,
        modules(
            "analysis",
            "figures",
            "figures/captions",
            "report",
            "seeds.py",
            "marks.py",
            "seals.py",
            "settings",
            "servers",
            "vllm/environment.py",
            "vllm/device_time",
            "vllm/step_probe",
            "vllm/step_records.py",
            "install.py",
            "config.py",
            "machine.py",
            "roofline.py",
            *SHARED,
        ),
        study=f"{RESULTS}/study.json",
        environment=f"{RESULTS}/environment.json",
        preflight=f"{RESULTS}/preflight/preflight_status.json",
        patch=f"{RESULTS}/patch/patch_status.json",
        rates=f"{RESULTS}/reference_rates.json",
    output:
        [
            report(
                table,
                caption="../report/table.rst",
                category="Tables",
                labels={"table": Path(table).name},
            )
            for table in TABLE_FILES
        ],
        [
            report(
                f"{RESULTS}/figures/{name}.png",
                caption=str(CAPTIONS / f"{name}.rst"),
                category="Figures",
                labels={"figure": name},
            )
            for name in NAMES
        ],
        [f"{RESULTS}/figures/{name}.svg" for name in NAMES],
        report(
            PAGE,
            caption="../report/page.rst",
            category="Page",
            labels={"page": "report"},
        ),
    log:
        f"{RESULTS}/logs/analyse.log",
    conda:
        CONDA
    shell:
        "python -m connector_tax.report --study {input.study} 2>&1 | tee {log}"


# Run as `snakemake compare --config studies=A,B`, with studies or archives.
rule compare:
    log:
        "results/compare/compare.log",
    conda:
        CONDA
    params:
        studies=two_studies,
    shell:
        "python -m connector_tax.compare {params.studies:q} 2>&1 | tee {log}"
