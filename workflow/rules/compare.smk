# Two studies or archives beside each other: `snakemake compare --config studies=A,B`. Nothing is measured.


def two_studies(wildcards):
    """The two paths, quoted for the shell."""
    named = [part.strip() for part in str(STUDIES or "").split(",") if part.strip()]
    if len(named) != 2:
        raise WorkflowError(
            f"compare: found studies={STUDIES}; allowed: --config studies=A,B, each a study's"
            " folder or an archive"
        )
    return " ".join(shlex.quote(name) for name in named)


rule compare:
    log:
        "results/compare/compare.log",
    params:
        studies=two_studies,
    shell:
        "python -m connector_tax.compare {params.studies} 2>&1 | tee {log}"
