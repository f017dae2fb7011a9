# Every published claim against the raw records. It remakes nothing: it looks at what is there.


rule audit:
    log:
        f"{RESULTS}/logs/audit.log",
    conda:
        CONDA
    params:
        study=f"{RESULTS}/study.json",
    shell:
        "python -m connector_tax.provenance.audit --study {params.study} --manifest MANIFEST.md"
        " 2>&1 | tee {log}"
