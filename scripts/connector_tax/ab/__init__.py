"""Compare servers by their command lines: make a study of them and print the answer."""
