"""The start of function_main.py as a rank's program: `python .../infini_run/jobs/function_start.py NAME`.

NAME is the function's, for status and ps. No import takes a module beside this file, or of the working directory.
"""

import os
import sys

if __name__ == "__main__":
    here = os.path.dirname(os.path.abspath(__file__))
    library = os.path.dirname(os.__file__)
    sys.path[:] = [path for path in sys.path if path[:1] == "/" and path != here]
    sys.path.insert(0, os.path.dirname(os.path.dirname(here)))
    sys.path.sort(key=lambda path: not path.startswith(library) or "-packages" in path)

    from infini_run.jobs.function_main import main

    main()
