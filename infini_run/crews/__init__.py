"""Functions and crews: workers that are Python, given by the caller, and talk with it over channels.

Nothing is imported here: a worker imports this package too, and starts in milliseconds.
"""
