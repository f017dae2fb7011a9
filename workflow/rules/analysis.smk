# Raw records to tables.


rule aggregate:
    input:
        launch_indexes("A"),
        launch_indexes("B"),
        launch_indexes("Bp"),
        modules("analysis", "seeds.py", *SHARED),
        study=f"{RESULTS}/study.json",
        patch=f"{RESULTS}/patch/patch_status.json",
        rates=f"{RESULTS}/reference_rates.json",
    output:
        [
            report(
                f"{RESULTS}/{paths.ANALYSIS}/{name}",
                caption="../report/table.rst",
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
