"""Define what a study leaves on disk: its names, its files, its records.

File names, phases, states and columns are defined only here. `names` has the names, `paths` the
files and folders, `study_file` reads study.json. Bytes are read and written by
`connector_tax.files`, which does not depend on this package.
"""
