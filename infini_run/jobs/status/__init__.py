"""How a job is: read, asked, followed."""
