"""The flags of infini-job: their table, and what is written out of it."""
