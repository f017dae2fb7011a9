"""The figures of the study: one module per subject, and one for their common style.

`names.draw(study, name)` returns a picture; `python -m connector_tax.report` writes it as PNG and
SVG. Reads and writes files only, without server, network or clock;
the same input gives the same bytes.
"""
