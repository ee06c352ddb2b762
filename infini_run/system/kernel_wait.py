"""What a thread waits for in the kernel: a socket, a pipe, a lock, or a poll. Pure.

System calls are the kernel's ABI, and the names of its functions are not: TCP waits in `wait_woken`, and `pipe_read`
became `anon_pipe_read`. So the call counts if it can be read, else the words of the function's name.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

KINDS = ("socket", "pipe", "lock", "poll")

_X86 = {  # arch/x86/entry/syscalls/syscall_64.tbl
    "file": (0, 1, 19, 20),  # read, write, readv, writev
    "socket": (42, 43, 44, 45, 46, 47, 288, 299),  # connect, accept, sendto, recvfrom, *msg, accept4, recvmmsg
    "lock": (202, 449, 455),  # futex, futex_waitv, futex_wait
    "poll": (232, 281, 441),  # epoll_wait, epoll_pwait, epoll_pwait2
    "select": (23, 270),  # select, pselect6: the number of descriptors comes first
    "list": (7, 271),  # poll, ppoll: it comes second
}
_GENERIC = {  # of asm-generic, for most others
    "file": (63, 64, 65, 66),
    "socket": (202, 203, 206, 207, 211, 212, 242, 243),
    "lock": (98, 449, 455),
    "poll": (22, 441),
    "select": (72,),
    "list": (73,),
}
_CALLS = {"x86_64": _X86, "aarch64": _GENERIC, "riscv64": _GENERIC, "loongarch64": _GENERIC}
_WORDS = {
    **dict.fromkeys(("sk", "skb", "sock", "socket", "unix", "inet", "tcp", "recv", "recvmsg", "vsock"), "socket"),
    **dict.fromkeys(("pipe", "fifo"), "pipe"),
    **dict.fromkeys(("futex",), "lock"),
    **dict.fromkeys(("poll", "ep", "epoll"), "poll"),
}


def wait_kind(function: str, call: str, link_of: Callable[[int], str], machine: str = os.uname().machine) -> str:
    """Return one of KINDS for what a sleeping thread waits in; empty: something else, or unknown.

    Args:
        function: The function of the kernel (`wchan` of proc(5)); empty: unknown.
        call: The line of its `syscall` of proc(5): the call's number and its arguments; anything else: unknown.
        link_of: Returns what one of its descriptors refers to, such as `socket:[4711]`; empty: unknown.
        machine: The machine as uname(2) names it.
    """
    number, *rest = call.split() or [""]
    calls = _CALLS.get(machine, {})
    if number.isdigit() and len(rest) > 2 and calls:
        name = next((name for name, numbers in calls.items() if int(number) in numbers), "")
        if name == "file":
            name = link_of(int(rest[0], 16)).partition(":")[0]
        elif name in ("select", "list"):
            name = "poll" if int(rest[name == "list"], 16) else "sleep"
        if name in (*KINDS, "sleep"):
            return name if name in KINDS else ""
    return next((_WORDS[word] for word in function.split("_") if word in _WORDS), "")
