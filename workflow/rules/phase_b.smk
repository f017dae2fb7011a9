# The shape sweeps: Phase B at ref_safe, Phase B' at ref_load. The rates are data the driver reads.


rule phase_b:
    input:
        study=ancient(f"{RESULTS}/study.json"),
        environment=ancient(f"{RESULTS}/env.txt"),
        preflight=ancient(f"{RESULTS}/preflight/preflight_status.json"),
        patch=ancient(f"{RESULTS}/patch/patch_status.json"),
        rates=ancient(f"{RESULTS}/reference_rates.json"),
    output:
        f"{RESULTS}/runs/{{config}}/block{{block}}/B/index.json",
    log:
        f"{RESULTS}/logs/{{config}}.block{{block}}.B.log",
    priority: launch_priority("B")
    threads: workflow.cores
    shell:
        "python -m connector_tax.study.launch --study {input.study} --config {wildcards.config:q}"
        " --block {wildcards.block:q} --phase B --log {log}"


# Phase B' follows Phase B (the design's stage 3), which ancient() says without asking for a re-run.
rule phase_bp:
    input:
        ancient(launch_indexes("B")),
        study=ancient(f"{RESULTS}/study.json"),
        environment=ancient(f"{RESULTS}/env.txt"),
        preflight=ancient(f"{RESULTS}/preflight/preflight_status.json"),
        patch=ancient(f"{RESULTS}/patch/patch_status.json"),
        rates=ancient(f"{RESULTS}/reference_rates.json"),
    output:
        f"{RESULTS}/runs/{{config}}/block{{block}}/Bp/index.json",
    log:
        f"{RESULTS}/logs/{{config}}.block{{block}}.Bp.log",
    priority: launch_priority("Bp")
    threads: workflow.cores
    shell:
        "python -m connector_tax.study.launch --study {input.study} --config {wildcards.config:q}"
        " --block {wildcards.block:q} --phase Bp --log {log}"
