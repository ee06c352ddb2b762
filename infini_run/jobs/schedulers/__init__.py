"""What each scheduler is asked, in its own words, and how it answers."""
