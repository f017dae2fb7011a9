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
        f"{RESULTS}/analysis/aggregate.json",
        f"{RESULTS}/analysis/aggregate.csv",
        f"{RESULTS}/analysis/taxes.csv",
        f"{RESULTS}/analysis/amplification.csv",
        f"{RESULTS}/analysis/steps.csv",
        f"{RESULTS}/analysis/step_taxes.csv",
        f"{RESULTS}/analysis/hooks.csv",
        f"{RESULTS}/analysis/step_cdf.csv",
        f"{RESULTS}/analysis/resources.csv",
        f"{RESULTS}/analysis/engine.csv",
        f"{RESULTS}/analysis/hypotheses.json",
    log:
        f"{RESULTS}/logs/aggregate.log",
    shell:
        "python -m connector_tax.analysis.aggregate --study {input.study} 2>&1 | tee {log}"
