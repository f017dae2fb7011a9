# Phase A sweeps the rates; Phases B and B' sweep the shapes at ref_safe and ref_load. One job per block: its
# launches in seeded order, their cells inside (docs/architecture.md, "Design decisions").


rule phase_a:
    input:
        block_looked_at,
        **READY,
    output:
        block_files("A", "runs/{config}/block{{block}}/{phase}/index.json"),
    log:
        block_files("A", "logs/{config}.block{{block}}.{phase}.log"),
    priority: block_priority("A")
    conda:
        CONDA
    threads: max(1, workflow.cores // max(1, len(SLOTS)))
    resources:
        **block_slots(),
        slurm_extra=slurm_options,
    params:
        phase="A",
        logs=f"{RESULTS}/logs",
    shell:
        "python -m connector_tax.study.block --study {input.study} --block {wildcards.block:q}"
        " --phase {params.phase:q} --logs {params.logs:q}"


use rule phase_a as phase_b with:
    input:
        **READY,
        rates=RATES,
    output:
        block_files("B", "runs/{config}/block{{block}}/{phase}/index.json"),
    log:
        block_files("B", "logs/{config}.block{{block}}.{phase}.log"),
    priority: block_priority("B")
    params:
        phase="B",
        logs=f"{RESULTS}/logs",


# After Phase B of its block; ancient() orders the jobs without causing a re-run.
use rule phase_a as phase_bp with:
    input:
        ancient(block_files("B", "runs/{config}/block{{block}}/{phase}/index.json")),
        **READY,
        rates=RATES,
    output:
        block_files("Bp", "runs/{config}/block{{block}}/{phase}/index.json"),
    log:
        block_files("Bp", "logs/{config}.block{{block}}.{phase}.log"),
    priority: block_priority("Bp")
    params:
        phase="Bp",
        logs=f"{RESULTS}/logs",


# Phase A alone, for studies that need no other phase.
rule sweep:
    input:
        launch_indexes("A"),
        study=f"{RESULTS}/study.json",
    log:
        f"{RESULTS}/logs/sweep.log",
    conda:
        CONDA
    shell:
        "python -m connector_tax.study.complete --study {input.study} --phase A 2>&1 | tee {log}"


# Saturation and the two reference rates, derived from Phase A.
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


# The throughput of plain for each shape, measured once on a server if the design needs it.
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
