"""What is asked of a scheduler, and the script that it gets. Pure."""
