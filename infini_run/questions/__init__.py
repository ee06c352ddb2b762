"""Questions to running launches: what --list and the flags beside it print, and `running` in Python."""
