"""Compare two studies, and check a study against bounds."""
