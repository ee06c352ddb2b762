"""Ranks that say nothing any more: how it is noticed, and what is found out about them before they are ended."""
