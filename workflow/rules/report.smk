# One page that holds everything.


rule report_html:
    input:
        FIGURE_FILES,
        rules.aggregate.output,
        launch_indexes("A"),
        launch_indexes("B"),
        launch_indexes("Bp"),
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
            caption="../report/page.rst",
            category="Page",
            labels={"page": "report"},
        ),
    log:
        f"{RESULTS}/logs/report.log",
    conda:
        CONDA
    shell:
        "python -m connector_tax.report --study {input.study} 2>&1 | tee {log}"
