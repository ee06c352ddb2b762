"""The first lines of both commands: where Python looks for modules, and how this process is called.

Python compiles their scripts (bin/) at every start, so these have what finds this module and no more. The one rule:
until `prepare` has put the standard library first, nothing is imported that is not built in.
"""

import gc
import sys
from _signal import SIG_DFL, default_int_handler, getsignal, signal

gc.disable()  # a launch makes few objects and no cycles, and looking for them costs start-up
if getsignal(2) is default_int_handler:  # Ctrl-C ends the command: nothing has started, and a submitted job continues
    signal(2, SIG_DFL)


class Site:
    """Finds a module that is nowhere on the path through `site` and its .pth files: a twentieth of a start."""

    @staticmethod
    def find_spec(name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name in sys.stdlib_module_names:
            return None  # a module of another system
        import site

        sys.meta_path.remove(Site)
        site.main()
        specs = (finder.find_spec(name, path, target) for finder in list(sys.meta_path))
        return next(filter(None, specs), None)


def prepare(name: str) -> None:
    """Put the standard library first on the path, and set what the kernel calls this process.

    Args:
        name: the command's name; at most 15 characters (PR_SET_NAME in prctl(2)).
    """
    sys.path.append(sys.path.pop(0))  # the script has put site-packages there
    if sys.flags.no_site:  # started by csrc/start/main.c
        sys.meta_path.append(Site)
        try:
            with open("/proc/self/comm", "w") as file:
                file.write(name)  # or it would be that of the interpreter
        except OSError:  # there is no /proc
            pass
