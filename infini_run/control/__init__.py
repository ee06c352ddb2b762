"""The control socket of a launch, in Python: who asks, and who is asked (csrc/io/control.c opens it)."""
