"""The live table, traces and plots. Nothing here changes a launch."""
