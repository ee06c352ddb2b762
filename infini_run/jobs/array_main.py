"""What the script of an array runs on this machine, where no scheduler is: the queue of its tasks.

python -m infini_run.jobs.array_main FOLDER
"""

from __future__ import annotations

import os
import sys

from infini_run.jobs.folder.job_dir import JobDir
from infini_run.jobs.request.script import inside_of
from infini_run.jobs.schedulers.local import Local
from infini_run.jobs.schedulers.local_queue import LocalQueue
from infini_run.jobs.status.status_query import query_status
from infini_run.lean_os import drop_coerced_locale


def main() -> None:
    """Run as the script of an array."""
    drop_coerced_locale()
    folder, environ = JobDir(os.path.abspath(sys.argv[1])), dict(os.environ)
    request = folder.read_submission().request
    scheduler = Local(folder.home, environ)
    LocalQueue(
        folder, request, environ,
        launcher=inside_of(request.python), query_end=lambda task: query_status([task], lambda _: scheduler),
    ).run()  # fmt: skip


if __name__ == "__main__":
    main()
