# `snakemake` in this folder. The workflow itself is in workflow/.


include: "workflow/Snakefile"


# Snakemake takes no default target from a file that is included.
workflow.default_target = "all" if ARCHIVE is None else "replot"
