"""One node's launch: start its ranks, follow them, restart them, end them."""
