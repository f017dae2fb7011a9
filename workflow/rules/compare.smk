# Two studies or archives beside each other: `snakemake compare --config studies=A,B`. Nothing is measured.


rule compare:
    log:
        "results/compare/compare.log",
    conda:
        CONDA
    params:
        studies=two_studies,
    shell:
        "python -m connector_tax.compare {params.studies:q} 2>&1 | tee {log}"
