"""Compare servers given as command lines: measure them in a study and print the answer."""
