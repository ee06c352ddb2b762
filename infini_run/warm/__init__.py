"""What a process needs that imports modules once, and becomes ranks or workers by fork.

`site` is a folder that goes first on PYTHONPATH of a user's command (docs/decisions/0066). `imports.py` is read by
path there, so it imports nothing of infini_run, and its syntax is that of Python 3.8.
"""
