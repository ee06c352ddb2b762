"""Deadlines of live ranks: how a hang is noticed, and the snapshots of every rank before the job is stopped."""
