"""Define what a study leaves on disk: its words, its files, its records.

The only room that knows a file name, a phase, a status or a column. `names` has the words, `paths`
the files and folders, `study_file` the reader of study.json. How bytes are written and read is
`connector_tax.files`, which knows nothing of a study.
"""
