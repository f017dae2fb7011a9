# The connector-tax study: what does an idle KV connector cost in vLLM?
# Table of contents: configuration, stages in the order data flows, targets.


include: "workflow/rules/common.smk"


if ARCHIVE is None:

    include: "workflow/rules/vllm.smk"
    include: "workflow/rules/environment.smk"
    include: "workflow/rules/preflight.smk"
    include: "workflow/rules/patch.smk"
    include: "workflow/rules/phase_a.smk"
    include: "workflow/rules/reference.smk"
    include: "workflow/rules/phase_b.smk"


include: "workflow/rules/analysis.smk"
include: "workflow/rules/figures.smk"
include: "workflow/rules/report.smk"


if ARCHIVE is None:

    include: "workflow/rules/manifest.smk"
    include: "workflow/rules/archive.smk"
    include: "workflow/rules/audit.smk"

    rule all:
        default_target: True
        input:
            f"{RESULTS}/complete.json",
            f"{RESULTS}/report.html",
            f"{RESULTS}/manifest.json",
            f"{RESULTS}/patch/revert_status.json",

else:

    include: "workflow/rules/replot.smk"

    # Here, because Snakemake takes no default target from a file that is included.
    rule replot:
        default_target: True
        input:
            rules.unpack.output,
            rules.aggregate.output,
            FIGURE_FILES,
            f"{RESULTS}/report.html",
            study=f"{RESULTS}/study.json",
        log:
            f"{RESULTS}/logs/replot.log",
        shell:
            "python -m connector_tax.provenance.audit --study {input.study} --manifest MANIFEST.md"
            " 2>&1 | tee {log}"


rule figures:
    input:
        FIGURE_FILES,


rule report:
    input:
        f"{RESULTS}/report.html",
