"""A function as a job: its files in the job's directory, and the way there and back.

    function         the versions that made it, a line of JSON; then the call and sys.path, as a worker gets them
    next             in the same form: the call that a checkpoint has left for the next run
    K/result.RANK    of run K, in the same form: what the call returned or raised on that rank

The one rule: a pickle is loaded only from a regular file of this user, which nobody else may write. Its size is
bounded, and the same versions of Python and infini-run made it (decision 86).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Set
from functools import partial
from itertools import islice

from infini_run.channel.errors import CannotUnpickle, ChannelBroken
from infini_run.crews.callables import called_as, check_callable_runs, fault_of_call, name_of, path_of_workers
from infini_run.crews.capture import capture_foreign
from infini_run.crews.protocol import TaskDone, TaskFailed, WorkerSetup, decode, dump, encode
from infini_run.crews.remote_exception import to_exception
from infini_run.crews.worker.import_guard import check_may_launch
from infini_run.errors import UsageError
from infini_run.jobs.errors import JobFailed
from infini_run.jobs.request.array import MOST
from infini_run.jobs.scheduler import COMPLETED
from infini_run.jobs.submit import FUNCTION_MAIN, FUNCTION_START
from infini_run.system.interpreter import find_python, foreign_words, inherited_flags, is_foreign
from infini_run.system.json_codec import decode as read_json
from infini_run.system.json_codec import encode as write_json
from infini_run.system.secure_files import read_regular
from infini_run.version import VERSION

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from infini_run.channel.serializer import Buffer
    from infini_run.crews.protocol import Message
    from infini_run.jobs.folder.job_dir import JobDir
    from infini_run.jobs.status.job_status import Status

LARGEST = 1 << 28  # bytes of a file: enough for arguments and metrics, and no place for a model
_LONGEST_LINE = 4096  # bytes before the pickle
_START = os.path.join(os.path.dirname(os.path.abspath(__file__)), FUNCTION_START)


# ---- there


def split_array(array: object) -> tuple[str | int | None, tuple[Any, ...] | None]:
    """Return the indices of tasks, and one argument per task.

    Args:
        array: Of `submit`: a list of arguments; a text or a number are indices, as for a command; None: no array.

    Returns:
        The arguments are None where the index of a task is its argument.

    Raises:
        UsageError: It is neither, or the list is empty or too long.
    """
    if array is None or (isinstance(array, (str, int)) and not isinstance(array, bool)):
        return array, None
    if isinstance(array, (bytes, Mapping, Set)) or not isinstance(array, Iterable):
        raise UsageError(
            f"array: {type(array).__name__} is not a list; use one argument per task, or indices such as '0-9%3'"
        )
    return indices_of(items := tuple(islice(array, MOST + 2))), items


def indices_of(items: Sequence[object]) -> str:
    """Return the indices of an array with one task per item. Raises UsageError: there are none, or too many."""
    if not items:
        raise UsageError("array=[]: expected at least one argument, one per task")
    if len(items) > MOST + 1:
        raise UsageError(f"array: expected at most {MOST + 1} arguments, one per task; let each task do several")
    return f"0-{len(items) - 1}"


def command_of(function: Callable[..., object], values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the command of each rank, which ends with the function's name, for status and ps.

    Args:
        function: What the ranks call.
        values: The value of every flag of submit.
    """
    if values["container"]:
        return (values["container_python"], *foreign_words(FUNCTION_MAIN), name_of(function))
    python = values["python"] or find_python()
    if is_foreign(python):
        return (python, *foreign_words(FUNCTION_MAIN), name_of(function))
    return (python, *inherited_flags(), _START, name_of(function))


def pack_call(
    function: Callable[..., object] | None, items: tuple[Any, ...] | None, values: Mapping[str, Any]
) -> bytes:
    """Return the content of `function`.

    Args:
        function: What the ranks call; None: each item is a call.
        items: Of an array the argument of each task; None: it is the task's index.
        values: The value of every flag of submit.

    Raises:
        UsageError: It is no function that runs or takes such a call, or too large; or a rank imports the module that
            submits.
        UnpicklableError: With the path of the part that does not pickle.
    """
    check_may_launch()
    name = _check_calls(function, items, is_array=bool(values["array"]))
    path = path_of_workers()
    if values["container"] or is_foreign(values["python"] or find_python()):  # that Python has its own libraries
        path = tuple(entry for entry in path if not entry.startswith((sys.prefix, sys.base_prefix)))
    target = dump((function, items), "command")
    setup = WorkerSetup(path=path, argv=tuple(sys.argv), target=target)
    saves = any(checkpoint_of(call) is not None for call in ((function,) if function is not None else items or ()))
    return pack(setup, f"command: {name}", saves=saves)


def checkpoint_of(call: Callable[[], object]) -> Callable[[], object] | None:
    """Return the method `checkpoint` of a callable with the arguments of the call; None: it has none."""
    function: Any = call
    args: tuple[object, ...] = ()
    kwargs: dict[str, object] = {}
    while isinstance(function, partial):
        args, kwargs = (*function.args, *args), {**function.keywords, **kwargs}
        function = function.func
    method = getattr(function, "checkpoint", None)
    return partial(method, *args, **kwargs) if callable(method) else None


def _check_calls(function: Callable[..., object] | None, items: tuple[Any, ...] | None, *, is_array: bool) -> str:
    """Return the name of what is called. Raises UsageError: nothing of it would run, or it takes other arguments."""
    if function is None:
        assert items is not None
        for call in {call.func: call for call in items}.values():
            check_callable_runs(call, "command")
        for call in items:
            _check_arguments(call, (), "use what it takes")
        return name_of(items[0])
    check_callable_runs(function, "command")
    if is_array:
        item = 0 if items is None else items[0]
        _check_arguments(function, (item,), "each task calls it with one argument, its item of array=")
    else:
        _check_arguments(function, (), "use functools.partial(FUNCTION, ARGUMENTS), or array=[...]")
    return name_of(function)


def _check_arguments(function: Callable[..., object], args: tuple[object, ...], hint: str) -> None:
    fault = fault_of_call(function, args, {})
    if fault:
        raise UsageError(f"command: {called_as(function)}: {fault}; {hint}")


def pack(message: Message, what: str, ranks: int = 0, *, saves: bool = False) -> bytes:
    """Return the content of a file.

    Args:
        message: What a crew would send.
        what: Its name for an error.
        ranks: How many ranks write such a file.
        saves: Whether it is a call that makes a checkpoint.

    Raises:
        UsageError: It is too large.
    """
    body = encode(message)
    head = write_json({**_versions(), "ranks": ranks, "saves": saves, "size": _size(body)})
    size = len(head) + 1 + _size(body)
    if size > LARGEST:
        raise UsageError(
            f"{what} has {size} bytes when pickled: expected at most {LARGEST}; save large data to a file that the "
            "nodes share, and pass its path"
        )
    return b"".join([head, b"\n", *body])


def _size(parts: Sequence[Buffer]) -> int:
    return sum(memoryview(part).nbytes for part in parts)


def _versions() -> dict[str, str]:
    cloudpickle = getattr(sys.modules.get("cloudpickle"), "__version__", "")
    return {
        "python": "{}.{}".format(*sys.version_info),
        "infini_run": VERSION,
        "cloudpickle": cloudpickle,
        "host": os.uname().nodename,
    }


# ---- back


def unpack(path: str) -> tuple[dict[str, Any], Message]:
    """Return the line of versions of a file, and what it has, still pickled.

    Args:
        path: The file.

    Raises:
        OSError: It is not readable, too large, or may be another user's.
        CannotUnpickle: Other versions made it, or it is damaged.
    """
    data = read_regular(path, LARGEST, only_own=True)
    end = data.find(b"\n", 0, _LONGEST_LINE)
    try:
        versions = read_json(data[: max(0, end)])
        theirs = f"Python {versions['python']} and infini-run {versions['infini_run']}"
        ranks, size = versions["ranks"], versions["size"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise damaged(path) from None
    here = _versions()
    ours = f"Python {here['python']} and infini-run {here['infini_run']}"
    if theirs != ours:
        raise CannotUnpickle(
            f"{path}: {theirs} made it, and {here['host']} has {ours}; use the same versions, or add --python=/PATH"
        )
    if size != len(data) - end - 1:  # cut off, which the message alone does not show
        raise damaged(path)
    try:
        message = decode(memoryview(data)[end + 1 :])
    except ChannelBroken:
        raise damaged(path) from None
    if type(ranks) is not int or not 0 <= ranks <= 1 << 22:
        raise damaged(path)
    return versions, message


def damaged(path: str) -> CannotUnpickle:
    """Return the error of a file that this version would not have written."""
    return CannotUnpickle(f"{path}: not as infini-job wrote it; check who changed it")


def failure_of(folder: JobDir, status: Status) -> BaseException | None:
    """Return why a finished job has no result; None: it has one.

    Args:
        folder: Of the job, or the task.
        status: How it ended.
    """
    rank = 0 if status.state == COMPLETED else status.rank
    if rank < 0 or status.attempt < 0:
        return _failed(status)
    try:
        versions, message = unpack(folder.result_file(status.attempt, rank))
    except FileNotFoundError:
        return _failed(status)
    except OSError as error:
        return _unreadable(error)
    except CannotUnpickle as error:
        return error
    if isinstance(message, TaskFailed):
        return to_exception(message, rank, str(versions.get("host", "")))
    return None if status.state == COMPLETED else _failed(status)


def result_of(folder: JobDir, status: Status, rank: int) -> tuple[object, int]:
    """Return what the call of a completed job returned on a rank, and how many ranks there are.

    Args:
        folder: Of the job, or the task.
        status: How it ended.
        rank: Which.

    Raises:
        CannotUnpickle: The result needs code that is missing here, or other versions made it.
        JobFailed: The rank left no result.
    """
    try:
        versions, message = unpack(folder.result_file(status.attempt, rank))
    except FileNotFoundError:
        raise _failed(status) from None
    except OSError as error:
        raise _unreadable(error) from None
    if not isinstance(message, TaskDone):
        raise _failed(status)
    return load(message.body.load, f"job {folder.name}: result of rank {rank}"), versions["ranks"]


def _failed(status: Status) -> JobFailed:
    why = f": {status.reason}" if status.reason else ""
    return JobFailed(
        f"job {status.name} has no result: {status.headline}{why}; run infini-job logs {status.name}",
        status.name,
        status.state,
        status.exit_code or 1,
    )


def _unreadable(error: OSError) -> CannotUnpickle:
    return CannotUnpickle(f"{error.filename} cannot be read: {error.strerror}; check who changed it")


def load(unpickle: Callable[[], Any], what: str) -> Any:
    """Return what `unpickle` does. Raises CannotUnpickle, in one line, for whatever that raises; `what` is its
    name."""
    thing, error = capture_foreign(unpickle)
    if isinstance(error, UsageError):  # the advice is its own
        raise CannotUnpickle(f"{what} cannot be loaded on {os.uname().nodename}: {error}") from error
    if error is not None:
        raise CannotUnpickle(
            f"{what} cannot be loaded on {os.uname().nodename}: {type(error).__name__}: {error}; install what is "
            "missing there"
        ) from error
    return thing
