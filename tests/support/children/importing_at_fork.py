"""A module that starts a thread after the first fork, and lets it import another one that takes for ever."""

import importlib
import os
import threading

begun = 0  # the process that has the thread
inside = threading.Event()


def begin():
    global begun
    if not begun:
        begun = os.getpid()
        threading.Thread(target=importlib.import_module, args=("endless_import",), daemon=True).start()
        inside.wait()


os.register_at_fork(after_in_parent=begin)
