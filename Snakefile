# `snakemake` in this folder. The workflow itself is in workflow/.


include: "workflow/Snakefile"


localrules:
    default,


# Snakemake takes no default target from an included file.
if ARCHIVE is None:

    rule default:
        default_target: True
        input:
            rules.all.input,

else:

    use rule replot as default with:
        default_target: True
