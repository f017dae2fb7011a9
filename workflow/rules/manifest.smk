# The manifest, which seals what is new since the last launch, and whether the study is complete.


rule manifest:
    input:
        launch_indexes("A"),
        launch_indexes("B"),
        launch_indexes("Bp"),
        study=f"{RESULTS}/study.json",
        environment=f"{RESULTS}/environment.json",
        patch=f"{RESULTS}/patch/patch_status.json",
        revert=f"{RESULTS}/patch/revert_status.json",
    output:
        f"{RESULTS}/manifest.json",
        f"{RESULTS}/manifest.md",
    log:
        f"{RESULTS}/logs/manifest.log",
    conda:
        CONDA
    shell:
        "python -m connector_tax.provenance.manifest --study {input.study} 2>&1 | tee {log}"


# Last, so that everything that can be made of an incomplete study is there when it says so. The indexes
# are inputs of their own: a missing one is made again only if something asks for it by name.
rule complete:
    input:
        launch_indexes("A"),
        launch_indexes("B"),
        launch_indexes("Bp"),
        f"{RESULTS}/report.html",
        f"{RESULTS}/manifest.json",
        f"{RESULTS}/patch/revert_status.json",
        study=f"{RESULTS}/study.json",
    output:
        f"{RESULTS}/complete.json",
    log:
        f"{RESULTS}/logs/complete.log",
    conda:
        CONDA
    shell:
        "python -m connector_tax.study.complete --study {input.study} --out {output} 2>&1 | tee {log}"
