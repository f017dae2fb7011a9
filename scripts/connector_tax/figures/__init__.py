"""The figures of the study: one module per subject, and one for their common style.

`names.draw(study, name)` returns a picture; `python -m connector_tax.figures` writes it as PNG and
SVG, and the plotted numbers as CSV. Reads and writes files only, without server, network or clock;
the same input gives the same bytes.
"""
