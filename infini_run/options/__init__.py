"""What was asked for: the flags, their grammar, their table, and what is made of them."""
