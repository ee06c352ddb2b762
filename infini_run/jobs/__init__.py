"""Jobs for batch queues: describe slots, get a script, submit it once, watch it, know its first failure.

The one rule: a job is one directory. A scheduler answers questions, and never has the only copy of anything.
"""
