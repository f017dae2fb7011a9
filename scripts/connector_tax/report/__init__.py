"""The report of a study: one self-contained HTML file with its figures."""
