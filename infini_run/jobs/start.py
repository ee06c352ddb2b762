"""The start of inside.py without site and its .pth files: `python -S .../infini_run/jobs/start.py FOLDER`.

We are found where this file is, what we need from others beside us, or else as any Python finds it.
"""

import os
import sys

if __name__ == "__main__":
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    library = os.path.dirname(os.__file__)
    here = os.path.dirname(os.path.abspath(__file__))  # what lies beside this file is no module of its name
    sys.path[:] = [path for path in sys.path if path[:1] == "/" and path != here]
    sys.path.append(package)
    sys.path.sort(key=lambda path: not path.startswith(library) or "-packages" in path)
    try:
        import _cffi_backend  # noqa: F401
    except ImportError:
        import site

        site.main()

    from infini_run.jobs.inside import main

    main()
