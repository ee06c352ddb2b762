"""The thread that owns workers: their states, tasks and events, and what their failure means."""
