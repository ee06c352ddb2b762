"""What schedulers and launchers say about us in the environment, one of them a file; detect.py asks them in turn."""
