# An archived study: checked, unpacked into a folder of its own, redrawn, audited. Included in
# place of every measuring rule, so nothing here can start a server.


rule unpack:
    input:
        ARCHIVE,
    output:
        f"{RESULTS}/archive.json",
        f"{RESULTS}/study.json",
        f"{RESULTS}/environment.json",
        f"{RESULTS}/reference_rates.json",
        f"{RESULTS}/manifest.json",
        f"{RESULTS}/patch/patch_status.json",
        f"{RESULTS}/preflight/preflight_status.json",
        INDEXES,
    log:
        f"{RESULTS}.unpack.log",
    conda:
        CONDA
    params:
        folder=RESULTS,
    shell:
        "python -m connector_tax.provenance.pack unpack --archive {input:q} --out {params.folder}"
        " 2>&1 | tee {log}"
