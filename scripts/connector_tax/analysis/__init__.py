"""Turn raw files into tables: no clock and no network, so the same input gives the same bytes."""
