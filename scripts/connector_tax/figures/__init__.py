"""The figures of the study: one module per figure over one style module.

Each figure module has `draw(study) -> Picture`; `python -m connector_tax.figures` writes the
picture as PNG and SVG and the plotted numbers as CSV. Files in, files out: no server, no network,
no clock, and the same inputs give the same bytes.
"""
