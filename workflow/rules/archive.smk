# One complete study, audited, as a single file that can be sent.

ARCHIVED = f"results/archive/{STUDY['study']}.tar.zst"


rule archive:
    input:
        ARCHIVED,


rule pack:
    input:
        f"{RESULTS}/complete.json",
        launch_indexes("A"),
        launch_indexes("B"),
        launch_indexes("Bp"),
        FIGURE_FILES,
        f"{RESULTS}/report.html",
        f"{RESULTS}/manifest.json",
        f"{RESULTS}/manifest.md",
        study=f"{RESULTS}/study.json",
    output:
        # An earlier archive stays where this one cannot be packed.
        update(ARCHIVED),
    log:
        f"{RESULTS}/logs/pack.log",
    conda:
        CONDA
    shell:
        "python -m connector_tax.provenance.archive pack --study {input.study} --manifest MANIFEST.md"
        " --out {output} 2>&1 | tee {log}"
