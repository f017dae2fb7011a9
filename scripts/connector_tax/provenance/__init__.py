"""Environment, manifest and archive of a study, and the audit: every published number once more."""
