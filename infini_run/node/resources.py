"""What a launch has open and lying about for its ranks: their logs, /dev/null, its folder.

The one rule: all of it exists before the first rank, and is gone after the last.
"""

from __future__ import annotations

from _stat import S_IFSOCK
from time import time

import infini_run.lean_os as os
from infini_run.errors import StartError
from infini_run.plan.program import MEMORY, NEW_S, has_room, is_folder_name, remove_launch_folder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from infini_run.control.listener import ControlListener
    from infini_run.options.launch_options import Options
    from infini_run.plan.model import Plan, Worker


FDS_PER_RANK = 2  # a pidfd, a notify socket
FDS_OF_LAUNCHER = 32  # of a group, with its guard, and what else is opened at a start
MOST_SEEN = 1000  # files of all users in memory: a stranger may make them without end


def has_descriptors(workers: Sequence[Worker], more: int = 0) -> bool:
    """Return whether a launch with the pipes of these workers stays within the limit on open descriptors.

    Both ends of every pipe are open until the ranks run.

    Args:
        workers: The workers of this node.
        more: Descriptors that are needed besides.
    """
    pipes = sum(worker.stdout.piped + worker.stderr.piped + (worker.stdin == "pipe") for worker in workers)
    wanted = 2 * pipes + FDS_PER_RANK * len(workers) + FDS_OF_LAUNCHER + more
    try:
        held = len(os.listdir("/proc/self/fd"))
    except OSError:
        held = 3
    return held + wanted <= os.sysconf("SC_OPEN_MAX")


class LaunchResources:
    """What a launch keeps open for its ranks.

    Args:
        listener: Has the launch's folder, if that outlives this attempt. None: the folder goes at the end.

    Attributes:
        logs: Descriptors of logs, by rank.
        error_logs: Descriptors of the logs of stderr alone, by rank.
        null: A descriptor of /dev/null above 2; -1: closed.
        folder: The launch's folder. Empty: it has none.
        log_folder: The absolute path of --log_dir, as the launcher changes to / later. Empty: none, or not opened.
        start_s: When the launch began, since the epoch, for who asks its control socket.
        error_folder: Where ranks leave their error files instead of where the plan says, because there is no room.
            Empty: nowhere. None: the plan is right.
    """

    def __init__(self, listener: ControlListener | None = None) -> None:
        self._listener = listener
        self.logs: dict[int, int] = {}
        self.error_logs: dict[int, int] = {}
        self.null = -1
        self.folder = ""
        self.log_folder = ""
        self.start_s = time() if listener is None else listener.start_s
        self.error_folder: str | None = None

    @property
    def control_fd(self) -> int:
        """The control socket of a launch that may restart; -1: the core makes one."""
        return -1 if self._listener is None else self._listener.fileno()

    def open_folder(self, plan: Plan, bases: Sequence[str]) -> bool:
        """Open /dev/null, and make the launch's folder.

        Args:
            plan: The plan of the launch.
            bases: Where the launch's folder may be instead, if it takes no sockets where the plan has it.

        Returns:
            Whether the launch's folder takes sockets.

        Raises:
            UsageError: A file cannot be created.
            StartError: A limit was hit.
        """
        self._open_null()
        if _is_in_memory(plan) and not has_room(MEMORY, 2 * len(plan.workers)):
            _remove_abandoned()  # they may be what fills it
        return bool(plan.folder) and self._make_folder(plan.folder, bases, len(plan.workers))

    def open_logs(self, plan: Plan, options: Options, heading: str) -> list[str]:
        """Open the logs, and find a place for error files. After the folder, and after the group: its descriptors
        are to be the lower ones (csrc/spawn/window.c).

        Args:
            plan: The plan of the launch.
            options: What the user asked for.
            heading: A line that each log gets first. Empty: none.

        Returns:
            Sentences about logs that another launch writes, too.

        Raises:
            UsageError: A file cannot be made.
        """
        problems = []
        if options.log_dir:
            self.log_folder = os.abspath(options.log_dir)
        if options.report or options.log_dir:
            from infini_run.system.secure_files import check_writable, open_logs

            check_writable("report", options.report, options.log_dir)
            own = {program.options.name for program in plan.programs if program.options.logs}
            others = [worker for worker in plan.workers if worker.program not in own] if own else plan.workers
            problems.append(open_logs(options.log_dir, others, self.logs, self.error_logs, heading, plan.nnodes))
        for program in plan.programs:
            if program.options.logs:
                from infini_run.system.secure_files import open_logs

                its = [worker for worker in plan.workers if worker.program == program.options.name]
                problems.append(open_logs(program.options.logs, its, self.logs, {}, heading, has_inner=False))
        count = len(plan.workers)
        has_files = bool(self.folder) and has_room(self.folder, 2 * count)
        if options.log_dir and not has_room(options.log_dir, count):
            self.error_folder = self.folder if has_files else ""
        elif not options.log_dir and self.folder and not has_files:
            self.error_folder = ""
        return [problem for problem in problems if problem]

    def remove_abandoned(self, plan: Plan) -> None:
        """Remove folders that killed launches have left in memory. Once the ranks run: they need not wait for it."""
        if _is_in_memory(plan):
            _remove_abandoned()

    def _open_null(self) -> None:
        try:
            self.null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
            if self.null < 3:  # the host program has closed its stdio
                from infini_run.system.stdio import above_stdio

                low, self.null = self.null, -1
                self.null = above_stdio(low)
        except OSError as error:
            raise StartError(str(error.strerror), "opening /dev/null", error.errno or 0) from None

    def _make_folder(self, folder: str, bases: Sequence[str], sockets: int) -> bool:
        """Make the folder. Without it ranks get no error file, and their notify sockets have abstract addresses."""
        other = f"{os.basename(folder)}.ir-{os.urandom(6).hex()}"  # strangers can guess that of a later attempt
        names = (folder, *(os.join(base, other) for base in bases))
        if self._listener is not None and (self._listener.folder or self._listener.open(names, sockets)):
            self.folder = self._listener.folder
            return True
        for name in names:
            try:
                os.mkdir(name, 0o700)
            except OSError:
                continue
            self._remove_folder()
            self.folder = name
            if _takes_sockets(name, sockets):
                return True
        return False

    def close_null(self) -> None:
        """Close the descriptor of /dev/null: the ranks have theirs."""
        null, self.null = self.null, -1  # first forgotten, then closed: never closed twice
        if null >= 0:
            os.close(null)

    def close(self) -> None:
        """Close all descriptors, and remove the launch's folder with what ranks made in it. Safe twice."""
        self.close_null()
        for logs in (self.logs, self.error_logs):
            while logs:
                os.close(logs.popitem()[1])
        self._remove_folder()

    def _remove_folder(self) -> None:
        folder, self.folder = self.folder, ""
        if not folder:
            return
        if self._listener is not None and folder == self._listener.folder:
            self._listener.empty()
        else:
            remove_launch_folder(folder)

    def after_fork_in_child(self) -> None:
        """Close the copies of the descriptors in a forked child. The folder stays the parent's."""
        self.folder = ""
        self.close()


def _takes_sockets(folder: str, count: int) -> bool:
    """Return whether a folder takes sockets. A disk that machines share, or a sandbox, may refuse them (mknod(2) of
    one needs no privilege)."""
    from posix import mknod, unlink

    try:
        os.chmod(folder, 0o700)  # a umask may have taken the owner's rights
        if not has_room(folder, count, of_bytes=0):
            return False
        mknod(f"{folder}/socket", S_IFSOCK | 0o600)
        unlink(f"{folder}/socket")
    except OSError:
        return False
    return True


def _is_in_memory(plan: Plan) -> bool:
    return bool(plan.folder) and os.dirname(plan.folder) == MEMORY


def _remove_abandoned() -> None:
    """Remove abandoned folders, in memory alone: of a lock on a disk that machines share, another machine may know
    nothing. The imports for a removal come only where there may be one. Strangers may have filled the place."""
    old, uid, before_s = [], os.geteuid(), time() - NEW_S
    try:
        with os.scandir(MEMORY) as entries:
            for _, entry in zip(range(MOST_SEEN), entries, strict=False):
                if is_folder_name(entry.name):
                    status = entry.stat(follow_symlinks=False)
                    if status.st_uid == uid and status.st_mtime < before_s:
                        old.append(entry.path)
    except OSError:
        return  # it may be written, not listed; or another launch was faster
    if old:
        from infini_run.system.secure_files import remove_abandoned

        remove_abandoned(old, NEW_S)
