"""The closing of copied descriptors in a child that the host program forks (os.fork, multiprocessing). A copy of a
pipe's end that stays open there would keep a rank, or the launcher, waiting for the end of the pipe.

Two rules. An object that opens descriptors registers here before it starts anything. `close_link` or `close_fd`
closes a socket or pipe of infini-run while another thread may fork, as the core does for its own (csrc/sys/fd.c).
"""

from __future__ import annotations

from _weakref import ref

import infini_run.lean_os as os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Protocol

    class ForkAware(Protocol):
        def after_fork_in_child(self) -> None:
            """Close the copies, and touch nothing of the parent. Safe twice, and on an object that is half made."""

    class Link(Protocol):
        def fileno(self) -> int: ...
        def close(self) -> None: ...


_modules: list[Callable[[], None]] = []
_known: set[ref[ForkAware]] = set()
_closings: list[tuple[int, int, int]] = []  # descriptors that are about to close: descriptor, device, inode


def call_in_forked_children(owner: ForkAware) -> None:
    """Call `owner.after_fork_in_child` in every forked child, as long as the owner exists.

    Args:
        owner: only a weak reference is held.
    """
    _known.add(ref(owner, _known.discard))


def call_for_module(function: Callable[[], None]) -> None:
    """Call a function in every forked child, and in the children of those, before the owners' turn.

    Args:
        function: closes copies of descriptors that a module keeps.
    """
    _modules.append(function)


def stayed_with_parent(what: str) -> str:
    """Return the error text for a forked child that uses an object of its parent's."""
    return f"{what} belongs to the parent of this forked process; make a new one here"


def close_link(link: Link, close: Callable[[], None] | None = None) -> None:
    """Close a socket so that no child keeps it that another thread forks meanwhile.

    The kernel copies descriptors before memory. So a child may have the descriptor though its memory says that the
    descriptor is closed; then the child closes it.

    Args:
        link: its `close` forgets the descriptor before it closes it.
        close: a function to call instead, where something else knows the link, too, and forgets it first.
    """
    _close(link.fileno(), close or link.close)


def close_fd(fd: int, forget: Callable[[], None]) -> None:
    """Do the same for a descriptor that its owner keeps as a number.

    Args:
        fd: the end of a pipe, or a socket, that this process made.
        forget: runs before the close; the owner no longer has the descriptor after it.
    """

    def close() -> None:
        forget()
        os.close(fd)

    _close(fd, close)


def _close(fd: int, close: Callable[[], None]) -> None:
    closing = _identity(fd)
    if closing is not None:
        _closings.append(closing)
    try:
        close()
    finally:
        if closing in _closings:  # else a signal handler has forked meanwhile, and this is the child
            _closings.remove(closing)


def _identity(fd: int) -> tuple[int, int, int] | None:
    try:
        status = os.fstat(fd)
    except OSError:  # it is closed
        return None
    return fd, status.st_dev, status.st_ino


def _close_again() -> None:
    """Close descriptors that no owner knows of, because this process's memory has them as closed."""
    for closing in _closings:
        if _identity(closing[0]) == closing:
            os.close(closing[0])
    _closings.clear()


def _after_fork_in_child() -> None:
    owners = [known() for known in list(_known)]
    _known.clear()
    _call_all([*_modules, *(owner.after_fork_in_child for owner in owners if owner is not None), _close_again])


def _call_all(functions: list[Callable[[], None]]) -> None:
    """Call all, even if one of them raises."""
    for at, function in enumerate(functions):
        try:
            function()
        except BaseException:
            _call_all(functions[at + 1 :])
            raise


os.register_at_fork(after_in_child=lambda: None)  # as in core/group.py
os.register_at_fork(after_in_child=_after_fork_in_child)
