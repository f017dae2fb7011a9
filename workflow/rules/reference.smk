# Saturation and the two reference rates, from Phase A alone.


rule reference_rates:
    input:
        launch_indexes("A"),
        modules("analysis", "seeds.py", *SHARED),
        study=f"{RESULTS}/study.json",
    output:
        f"{RESULTS}/reference_rates.json",
    log:
        f"{RESULTS}/logs/reference_rates.log",
    conda:
        CONDA
    shell:
        "python -m connector_tax.analysis.reference --study {input.study} 2>&1 | tee {log}"


# How much of each shape plain can serve; asked of a server, once, where the design wants it.
rule shape_rates:
    input:
        **READY,
        rates=ancient(f"{RESULTS}/reference_rates.json"),
    output:
        f"{RESULTS}/preflight/shape_rates.json",
    log:
        f"{RESULTS}/logs/shape_rates.log",
    conda:
        CONDA
    threads: workflow.cores
    shell:
        "python -m connector_tax.study.shape_rates --study {input.study} 2>&1 | tee {log}"
