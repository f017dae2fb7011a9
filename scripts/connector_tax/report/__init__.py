"""The report of a study: one HTML file that holds its figures and needs no network."""
