"""The questions to each scheduler, in its own words, and its answers."""
