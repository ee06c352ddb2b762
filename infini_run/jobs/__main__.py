"""`python -m infini_run.jobs`: the same as infini-job."""

import _signal
import os
import sys

if _signal.getsignal(2) is _signal.default_int_handler:  # as in bin/infini-job
    _signal.signal(2, _signal.SIG_DFL)
try:
    if sys.path[0] == os.getcwd():  # -m puts it there: imports of this package must not look in it
        del sys.path[0]
except FileNotFoundError:  # it was deleted, and -m has put nothing there
    pass
if "PYTHONPATH" in os.environ:  # the standard library comes before it
    sys.path.sort(key=lambda path: not path.startswith(os.path.dirname(os.__file__)) or "-packages" in path)

from infini_run.jobs.cli import main

main()
