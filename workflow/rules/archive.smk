# The manifest, the check for completeness, the archive, and the audit of published claims.

ARCHIVED = f"results/archive/{STUDY['study']}.tar.zst"


# Seals the files that are new since the last launch, and lists the digest of every published file.
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


# Runs last, so that all results of an incomplete study exist when it reports missing launches. The indexes
# are explicit inputs, since Snakemake remakes a missing file only if a rule requires it by name.
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


# A complete, audited study as a single file.
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
        # An earlier archive is kept if this one cannot be packed.
        update(ARCHIVED),
    log:
        f"{RESULTS}/logs/pack.log",
    conda:
        CONDA
    shell:
        "python -m connector_tax.provenance.pack pack --study {input.study} --manifest MANIFEST.md"
        " --out {output} 2>&1 | tee {log}"


# Checks every published claim against the raw records, without remaking any file of the study.
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
