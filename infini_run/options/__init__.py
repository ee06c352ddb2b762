"""The options of a launch: the flags, their grammar, their table, and what the package makes of them."""
