"""The figures of the study: a module for each subject over one style module.

`names.draw(study, name)` gives a picture; `python -m connector_tax.figures` writes it as PNG and
SVG and the plotted numbers as CSV. Files in, files out: no server, no network,
no clock, and the same inputs give the same bytes.
"""
