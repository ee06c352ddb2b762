"""Where all jobs are: a directory for each, by its name. Those of other users are theirs."""

from __future__ import annotations

import os
import stat

from infini_run.errors import UsageError
from infini_run.jobs.folder.job_dir import JobDir
from infini_run.jobs.folder.task import task_of
from infini_run.jobs.request.array import split

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

PREFIX = "ir-"
_ID_SIZE = 5  # random bytes of a name


def home(given: str, environ: Mapping[str, str]) -> str:
    """Return the directory of all jobs: `given` (--dir), or ~/.infini-run/jobs.

    Raises:
        UsageError: `given` is relative, and the current directory is gone.
    """
    path = given or os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".infini-run", "jobs")
    try:
        return os.path.abspath(path)
    except FileNotFoundError:
        raise UsageError(f"--dir={path}: the current directory was removed; use a path from /") from None


def home_to_write(given: str, environ: Mapping[str, str]) -> str:
    """Return the directory of all jobs as `home` does, if infini-job may create it: in an existing home directory.

    Raises:
        UsageError: There is no home directory (a container's user, /nonexistent), or it is no path.
    """
    user = environ.get("HOME") or os.path.expanduser("~")
    if not given and not (user.startswith("/") and os.path.isdir(user)):
        raise UsageError(
            f"HOME={user}: not a directory, and jobs need ~/.infini-run; set HOME, or add "
            "--dir=DIR on storage that the nodes share"
        )
    return home(given, environ)


def new_name() -> str:
    return PREFIX + os.urandom(_ID_SIZE).hex()


def is_name(text: str) -> bool:
    body = text.removeprefix(PREFIX)
    return text != body and len(body) == 2 * _ID_SIZE and not body.strip("0123456789abcdef")


def make_folder(above: str, name: str) -> JobDir:
    """Make a new job's directory, with those above it. Raises UsageError if that fails."""
    path = os.path.join(above, name)
    try:
        os.makedirs(above, mode=0o700, exist_ok=True)
        os.mkdir(path, 0o700)
    except OSError as error:
        raise UsageError(
            f"--dir={above}: cannot create a job directory there: {error.strerror}; "
            "use a directory that you can write and that the nodes share"
        ) from None
    return JobDir(path)


def find_folder(above: str, name: str) -> JobDir:
    """Return the directory of a job, or of a task (NAME.K).

    Args:
        above: The directory of all jobs.
        name: Of the job.

    Raises:
        UsageError: There is none, or it belongs to another user.
    """
    base, index = split(name) if isinstance(name, str) else ("", -1)
    if index >= 0 and is_name(split(base)[0]):  # of a task `task_of` says that it has none
        return task_of(find_folder(above, base), index)
    if not isinstance(name, str) or not is_name(name):
        raise UsageError(f"{name!a}: not a job name ({PREFIX}0123456789); run infini-job list")
    path = os.path.join(above, name)
    try:
        found = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"job {name}: unknown in {above}; run infini-job list") from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; only its owner can read a job") from None
    if not stat.S_ISDIR(found.st_mode):
        raise UsageError(f"{path}: not a job directory")
    if found.st_uid != os.geteuid():
        raise UsageError(f"job {name} belongs to {_user(found.st_uid)}: only its owner can read it")
    return JobDir(path)


def _user(uid: int) -> str:
    import pwd

    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"


def all_names(above: str) -> list[str]:
    """Return the names of what may be jobs, in any order; none, where none was ever submitted. Raises UsageError."""
    try:
        return [name for name in os.listdir(above) if is_name(name)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UsageError(f"--dir={above} cannot be read: {error.strerror}") from None


def owners(above: str) -> dict[str, int]:
    """Return how many directories of jobs other users have there. Raises UsageError."""
    found: dict[str, int] = {}
    for name in all_names(above):
        try:
            uid = os.lstat(os.path.join(above, name)).st_uid
        except OSError:
            continue
        if uid != os.geteuid():
            found[_user(uid)] = found.get(_user(uid), 0) + 1
    return found


def begun_ns(path: str) -> int:
    """Return when the job in that directory was submitted, in ns since the epoch; -1 for a directory in creation or
    removal, or another user's."""
    try:
        at = os.lstat(path)
        is_ours = stat.S_ISDIR(at.st_mode) and at.st_uid == os.geteuid()
        return os.lstat(os.path.join(path, "request.json")).st_mtime_ns if is_ours else -1
    except FileNotFoundError:
        return -1
    except OSError:  # who reads it says why
        return 0


def remove(folder: JobDir) -> None:
    """Remove a directory with all that is in it, of a job that nobody submitted."""
    from infini_run.system.secure_files import remove_folder

    remove_folder(folder.path)
