# The rate sweep: one job per server launch, its cells inside (docs/architecture.md, "Why it is this way").


rule phase_a:
    input:
        study=ancient(f"{RESULTS}/study.json"),
        environment=ancient(f"{RESULTS}/env.txt"),
        preflight=ancient(f"{RESULTS}/preflight/preflight_status.json"),
        patch=ancient(f"{RESULTS}/patch/patch_status.json"),
    output:
        f"{RESULTS}/runs/{{config}}/block{{block}}/A/index.json",
    log:
        f"{RESULTS}/logs/{{config}}.block{{block}}.A.log",
    priority: launch_priority("A")
    threads: workflow.cores
    shell:
        "python -m connector_tax.study.launch --study {input.study} --config {wildcards.config:q}"
        " --block {wildcards.block:q} --phase A --log {log}"


# Phase A alone, where it answers a question of its own.
rule sweep:
    input:
        launch_indexes("A"),
