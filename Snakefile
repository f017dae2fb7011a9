# `snakemake` in this folder. The workflow itself is in workflow/.


include: "workflow/Snakefile"


# An included file has no say in this.
workflow.default_target = "all" if ARCHIVE is None else "replot"
