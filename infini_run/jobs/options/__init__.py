"""The flags of infini-job: their table, and what the package writes from it."""
