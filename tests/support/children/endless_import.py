"""Its import never ends in the process where importing_at_fork has started a thread for it."""

import os
import sys
import threading

starter = sys.modules.get("importing_at_fork")
if starter is not None and starter.begun == os.getpid():
    starter.inside.set()
    threading.Event().wait()
