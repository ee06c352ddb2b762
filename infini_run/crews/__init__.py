"""Functions and crews: workers that are Python, given by the caller, and talk with it over channels.

Four rooms, of which each imports those after it: `api` (what a program calls), `supervision` (the thread that owns
workers), `spawn` (how their processes start) and `worker` (what runs in them). The modules beside them are the ground
of all four.

No import happens here: a worker imports this package too, and starts in milliseconds.
"""
