"""Jobs for batch queues: describe slots, get a script, submit it once, watch it, know its first failure.

The one rule: a job is one directory. What a scheduler knows is asked for, and never the only copy of anything.
"""
