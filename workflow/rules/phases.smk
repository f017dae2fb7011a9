# Phase A sweeps the rates; Phases B and B' sweep the shapes at ref_safe and ref_load. One job per server
# launch, its cells inside (docs/architecture.md, "Why it is this way").


rule phase_a:
    input:
        **READY,
    output:
        launch_file("A"),
    log:
        launch_log("A"),
    priority: launch_priority("A")
    threads: workflow.cores
    params:
        phase="A",
    shell:
        "python -m connector_tax.study.launch --study {input.study} --config {wildcards.config:q}"
        " --block {wildcards.block:q} --phase {params.phase:q} --log {log}"


use rule phase_a as phase_b with:
    input:
        **READY,
        rates=RATES,
    output:
        launch_file("B"),
    log:
        launch_log("B"),
    priority: launch_priority("B")
    params:
        phase="B",


# After Phase B, which ancient() says without asking for a re-run.
use rule phase_a as phase_bp with:
    input:
        ancient(launch_indexes("B")),
        **READY,
        rates=RATES,
    output:
        launch_file("Bp"),
    log:
        launch_log("Bp"),
    priority: launch_priority("Bp")
    params:
        phase="Bp",


# Phase A alone, where it answers a question of its own.
rule sweep:
    input:
        launch_indexes("A"),
        study=f"{RESULTS}/study.json",
    log:
        f"{RESULTS}/logs/sweep.log",
    shell:
        "python -m connector_tax.study.complete --study {input.study} --phase A 2>&1 | tee {log}"
