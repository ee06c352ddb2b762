"""A module whose import waits until the guard of the process that has started us is executed."""

import os
import time
from pathlib import Path


def _is_guarded():
    children = Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read_text().split()
    return any(os.readlink(f"/proc/{pid}/exe").endswith("irun-guard") for pid in children)


while not _is_guarded():
    time.sleep(0.01)
