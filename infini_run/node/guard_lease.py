"""The lease of the ranks of one node, as its guard holds it. Imported where ranks have one."""

from __future__ import annotations

from infini_run.record import record


@record
class GuardLease:
    """For how long ranks may live unless `NodeLaunch.renew_lease` renews it, also while their launcher is suspended.

    Attributes:
        length_s: The guard kills the ranks after this many seconds without a renewal.
        since_s: When the first lease began, by CLOCK_BOOTTIME in seconds; 0: with the launch.
        last_word: What the guard sends to the peer of `link_fd` after the death of the launcher and the ranks; b"":
            nothing.
        link_fd: The connection to the head, which stays its owner's; -1: none.
    """

    length_s: float
    since_s: float = 0.0
    last_word: bytes = b""
    link_fd: int = -1
