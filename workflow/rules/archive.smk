# The manifest, whether the study is complete, its archive, and the audit of what is published.

ARCHIVED = f"results/archive/{STUDY['study']}.tar.zst"


# It seals what is new since the last launch, and names the digest of every published file.
rule manifest:
    input:
        INDEXES,
        rules.analyse.output,
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
        INDEXES,
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


# One complete study, audited, as a single file that can be sent.
rule archive:
    input:
        ARCHIVED,


rule pack:
    input:
        f"{RESULTS}/complete.json",
        INDEXES,
        rules.analyse.output,
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
        "python -m connector_tax.provenance.pack pack --study {input.study} --manifest MANIFEST.md"
        " --out {output} 2>&1 | tee {log}"


# Every published claim against the raw records. It remakes nothing: it looks at what is there.
rule audit:
    log:
        f"{RESULTS}/logs/audit.log",
    conda:
        CONDA
    params:
        study=f"{RESULTS}/study.json",
        accepted=ACCEPTED,
    shell:
        "python -m connector_tax.provenance.audit --study {params.study} --manifest MANIFEST.md"
        " {params.accepted:q} 2>&1 | tee {log}"
