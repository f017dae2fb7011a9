"""Two studies beside each other, and a study against a bound."""
