"""The measuring side: resolved design, server launches, cells and their artifacts."""
