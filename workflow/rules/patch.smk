# Step timing on before the first measurement, off after the last, also when the run fails.


rule patch_apply:
    input:
        study=ancient(f"{RESULTS}/study.json"),
        preflight=ancient(f"{RESULTS}/preflight/preflight_status.json"),
    output:
        f"{RESULTS}/patch/patch_status.json",
    log:
        f"{RESULTS}/logs/patch_apply.log",
    conda:
        CONDA
    shell:
        "python -m connector_tax.study.patch apply --study {input.study} 2>&1 | tee {log}"


rule patch_revert:
    input:
        launch_indexes("A"),
        launch_indexes("B"),
        launch_indexes("Bp"),
        study=ancient(f"{RESULTS}/study.json"),
        patch=ancient(f"{RESULTS}/patch/patch_status.json"),
    output:
        f"{RESULTS}/patch/revert_status.json",
    log:
        f"{RESULTS}/logs/patch_revert.log",
    conda:
        CONDA
    shell:
        "python -m connector_tax.study.patch revert --study {input.study} 2>&1 | tee {log}"


onerror:
    if LACKING:
        raise WorkflowError(HINT)
    # Whatever ended the run: the same command measures what failed or was damaged.
    for launch, reason in withdraw_failed(
        every_launch(STUDY), Path(RESULTS)
    ).items():
        print(f"MISSING {launch.folder(Path(RESULTS))}: {reason}", file=sys.stderr)
    for line in withdraw_damaged(STUDY, Path(RESULTS)):
        print(f"DAMAGED {line} by the same command", file=sys.stderr)
    if Path(RESULTS, "patch", "patch_status.json").exists():
        shell(
            f"python -m connector_tax.study.patch revert --study {RESULTS}/study.json"
        )
