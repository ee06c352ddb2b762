"""`python -m infini_run.jobs`: the same as infini-job."""

import _signal

if _signal.getsignal(2) is _signal.default_int_handler:  # as in bin/infini-job
    _signal.signal(2, _signal.SIG_DFL)

from infini_run.jobs.cli import main

main()
