"""The facts that schedulers and launchers put in the environment, a module each; detect.py asks them in turn."""
