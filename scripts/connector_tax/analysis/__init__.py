"""From raw files to tables: reads artifacts only, no clock, no network; same input, same bytes."""
