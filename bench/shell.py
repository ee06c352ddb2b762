"""An interactive shell on a pty, to type at: who has the terminal can only be asked of a real one."""

from __future__ import annotations

import os
import select
import shutil
import termios
import time
from types import TracebackType
from typing import Any

from sample import CommandFailed

PROMPT = "next> "


class Shell:
    def __init__(self) -> None:
        bash = shutil.which("bash")
        if bash is None:
            raise CommandFailed("there is no bash to type at")
        self._bash = bash
        self._master, self._slave = os.openpty()
        attributes = termios.tcgetattr(self._slave)
        attributes[3] &= ~termios.ECHO  # so that what is seen was said
        termios.tcsetattr(self._slave, termios.TCSANOW, attributes)
        self._seen = ""

    def place(self) -> dict[str, Any]:
        """Of a trial: the command that it keeps, and what that has for stdin, stdout and stderr."""
        return {
            "command": [self._bash, "--norc", "--noprofile", "--noediting", "-i"],
            "stdio": self._slave,
            "env": {"PS1": PROMPT, "HISTFILE": "/dev/null", "TERM": "dumb"},
        }

    def __enter__(self) -> Shell:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        os.close(self._slave)
        os.close(self._master)

    def type(self, text: str) -> None:
        self._seen = ""
        os.write(self._master, text.encode())

    def see_prompt(self, limit_s: float) -> bool:
        """Whether the shell asked for the next command since the last key."""
        end = time.monotonic() + limit_s
        while PROMPT not in self._seen:
            if not select.select([self._master], [], [], max(0.0, end - time.monotonic()))[0]:
                return False
            self._seen += os.read(self._master, 65536).decode(errors="replace")
        return True

    @property
    def foreground(self) -> int:
        return os.tcgetpgrp(self._master)
