"""The front door: command lines of servers to a study, and its answer in three lines."""
