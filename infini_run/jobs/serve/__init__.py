"""infini-job serve: the verbs as HTTP over a Unix socket, and a page for people. Needs the extra infini-run[serve].

The one rule: nothing here knows anything of jobs. Each request is a call of what the command itself calls.
"""
