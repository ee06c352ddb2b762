"""Files, processes, cgroups, polling: the kernel's services. Nothing here knows of a launch."""
