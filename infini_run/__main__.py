"""`python -m infini_run`: the same command."""

import _signal

if _signal.getsignal(2) is _signal.default_int_handler:  # as in bin/infini-run
    _signal.signal(2, _signal.SIG_DFL)

from infini_run.cli import main

main()
