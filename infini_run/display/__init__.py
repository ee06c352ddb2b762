"""For people who watch: the live table, traces, plots. Nothing here changes what a launch does."""
