"""A /proc that does not show a program its processes."""

from __future__ import annotations

# How it is hidden: flags of unshare, and what a shell does then.
HIDING = {
    "unmounted": ("--mount", "umount --lazy /proc"),
    "empty": ("--mount", "mount -t tmpfs none /proc"),
    "another namespace's": ("--pid --fork", ":"),
    "unmounted in a namespace": ("--mount --pid --fork", "umount --lazy /proc"),
}


def hidden(hiding: str) -> tuple[str, ...]:
    """What stands before the program."""
    flags, hide = HIDING[hiding]
    return ("unshare", *flags.split(), *["--kill-child"] * ("fork" in flags), "sh", "-c", f'{hide}; exec "$@"', "sh")
