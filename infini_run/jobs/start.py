"""The start of allocation_main.py without site and its .pth files: `python -S .../infini_run/jobs/start.py FOLDER`.

The package is where this file is. What it needs from others is beside it, or else where any Python finds it.
"""

import os
import sys

if __name__ == "__main__":
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    library = os.path.dirname(os.__file__)
    here = os.path.dirname(os.path.abspath(__file__))  # a file beside this one is no module of its name
    sys.path[:] = [path for path in sys.path if path[:1] == "/" and path != here]
    sys.path.append(package)
    sys.path.sort(key=lambda path: not path.startswith(library) or "-packages" in path)
    try:
        import _cffi_backend  # noqa: F401
    except ImportError:
        import site

        site.main()

    from infini_run.jobs.allocation_main import main

    main()
