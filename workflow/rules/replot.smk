# Check an archived study, unpack it into a new folder, draw it again and audit it. These rules
# replace every measuring rule, so that a replot cannot start a server.

from connector_tax.files import sha256_file


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
        # Another archive is unpacked even if its file is older.
        sha256=sha256_file(Path(ARCHIVE)),
    shell:
        "python -m connector_tax.provenance.pack unpack --archive {input:q} --out {params.folder}"
        " 2>&1 | tee {log}"
