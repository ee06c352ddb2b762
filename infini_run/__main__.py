"""`python -m infini_run`: the same command."""

import _signal
import os
import sys

if _signal.getsignal(2) is _signal.default_int_handler:  # as in start.py
    _signal.signal(2, _signal.SIG_DFL)
try:
    if sys.path[0] == os.getcwd():  # -m puts it there, and no module of infini-run may come from it
        del sys.path[0]
except FileNotFoundError:  # it was deleted, and -m has put nothing there
    pass
if "PYTHONPATH" in os.environ:  # the standard library comes before it
    sys.path.sort(key=lambda path: not path.startswith(os.path.dirname(os.__file__)) or "-packages" in path)

from infini_run.cli import main

main()
