"""What the kernel offers: files, processes, cgroups, polling. Nothing here knows of a launch."""
