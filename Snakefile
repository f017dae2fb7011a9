# `snakemake` in this folder. The workflow itself is in workflow/.


include: "workflow/Snakefile"


localrules:
    default,


# Snakemake takes no default target from a file that is included.
if ARCHIVE is None:

    rule default:
        default_target: True
        input:
            rules.all.input,

else:

    use rule replot as default with:
        default_target: True
