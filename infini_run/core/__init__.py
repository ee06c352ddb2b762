"""The only door to the C extension."""
