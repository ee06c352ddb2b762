"""The meaning of torchrun's own flags here. Imported only where one of them is given.

The rule: each becomes a flag of infini-run in this one place, and the rest of the program never hears of it. The
table for people is docs/reference/torchrun.md.
"""

from __future__ import annotations

from infini_run import value_types
from infini_run.errors import UsageError
from infini_run.options.grammar import quote
from infini_run.record import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from infini_run.options.grammar import Setting

# torch/numa/binding.py. A core complex is one L3 cache per rank: a separate share comes nearest.
BINDS = {"node": "numa", "socket": "socket", "exclusive": "cores", "core-complex": "cores"}


def rdzv_conf(text: str) -> str:
    """Read `K=V,...`, of which only join_timeout counts: there is no rendezvous before the program's own."""
    if not all(part.partition("=")[0].strip() and "=" in part for part in text.split(",") if part.strip()):
        raise ValueError(
            "expected K=V,...; only join_timeout has an effect; use --rdzv_endpoint=HOST:PORT for the address of "
            "rank 0, and --ready_timeout=TIME to limit how long ranks take to meet"
        )
    _join_timeout(text)
    return text


def _join_timeout(text: str) -> float | None:
    """Return how long to wait for all nodes, if the text has a time. Raises ValueError."""
    found = None
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name.strip() == "join_timeout":
            try:
                found = value_types.duration(value.strip())
            except ValueError as error:
                raise ValueError(f"join_timeout: {error}") from None
    return found


def signals_to_handle(text: str) -> str:
    """Check names of signals: infini-run handles all that can be handled."""
    for name in text.split(","):
        if name.strip():
            try:
                value_types.stop_signal(name.strip())
            except ValueError:
                raise ValueError(
                    f"{quote(name.strip())}: not a signal that can be handled; drop the flag: TERM, INT, and QUIT "
                    "stop the job, and HUP, USR1, and others reach every rank"
                ) from None
    return text


KINDS: dict[str, Callable[[str], object]] = {
    "local_addr": value_types.address,
    "monitor_interval": value_types.duration,
    "rdzv_conf": rdzv_conf,
    "signals_to_handle": signals_to_handle,
}


def translate(given: dict[str, Setting]) -> None:
    """Put infini-run's flags in the place of torchrun's.

    Raises UsageError: a flag of infini-run, by the same authority, says something else.
    """
    conf = given.get("rdzv_conf")
    join_timeout_s = None if conf is None else _join_timeout(conf.value)
    if conf is not None and join_timeout_s is not None:
        _put(given, "join_timeout", replace(conf, value=join_timeout_s))
    binding = given.get("numa_binding")
    if binding is not None and binding.value:
        _put(given, "bind", replace(binding, value=BINDS[binding.value]))
    virtual = given.get("virtual_local_rank")
    if virtual is not None and virtual.value and not ("gpus_per_proc" in given and given["gpus_per_proc"].value):
        _put(given, "gpus_per_proc", replace(virtual, value=1))
        if not given["gpus_per_proc"].value:  # a higher authority: all see all GPUs, and each needs its own number
            given["virtual_local_rank"] = replace(virtual, value=False)


def _put(given: dict[str, Setting], name: str, setting: Setting) -> None:
    ours = given.get(name)
    if ours is not None and ours.precedence == setting.precedence and ours.value != setting.value:
        raise UsageError(f"{ours.origin} conflicts with {setting.origin}; drop one of them")
    if ours is None or ours.precedence > setting.precedence:
        given[name] = setting


def log_folder(run_id: str, launch_id: str, node: int | None, attempt: int, local_rank: int) -> str:
    """Return the place of a rank's files below --log_dir (torch/distributed/elastic/multiprocessing/api.py,
    DefaultLogsSpecs).

    torchrun takes a random folder per node. Here that is the launch's own id, which is as unique, and the same for
    all attempts. `node` is its rank: several nodes share the launch's id, and may share the folder. None: alone.
    """
    unique = launch_id.rpartition("-")[2].partition(".")[0]
    level = "" if node is None else f"/node_{node}"
    return f"{run_id}_{unique}{level}/attempt_{attempt}/{local_rank}"


def in_attempt(path: str, attempt: int) -> str:
    """Return the same file of another attempt."""
    above, found, rest = path.rpartition("/attempt_")
    if not found:
        return path
    return f"{above}/attempt_{attempt}/{rest.partition('/')[2]}"
