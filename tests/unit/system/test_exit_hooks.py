"""What owns processes is closed when the interpreter exits."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os
from infini_run.system.exit_hooks import close_at_exit, closed

class Owner:
    def __init__(self, name, failure=None):
        self.name, self.failure, self.number = name, failure, close_at_exit(self)
    def close_at_exit(self):
        print(self.name, flush=True)
        if self.failure:
            raise self.failure
"""


def lines_at_exit(program):
    done = subprocess.run([sys.executable, "-c", PROGRAM + program], capture_output=True, text=True, timeout=60)
    return done.stdout.split(), done.stderr


def test_the_latest_is_closed_first_and_one_that_was_closed_or_dropped_not_at_all():
    program = "a, b, c = Owner('a'), Owner('b'), Owner('c'); closed(b.number); closed(b.number); Owner('dropped')"
    assert lines_at_exit(program) == (["c", "a"], "")


def test_a_failure_or_an_interrupt_keeps_no_other_owner_open():
    program = "a, b, c = Owner('a'), Owner('b', KeyboardInterrupt()), Owner('c', OSError('of c'))"
    closed, error = lines_at_exit(program)
    assert closed == ["c", "b", "a"]
    assert "KeyboardInterrupt" in error


def test_any_number_of_owners_is_closed():
    count = 3000  # Python allows 1,000 calls within each other
    closed, error = lines_at_exit(f"owners = [Owner(str(n)) for n in range({count})]")
    assert closed == [str(n) for n in reversed(range(count))]
    assert error == ""


def test_a_forked_child_closes_nothing_of_its_parents():
    program = "a = Owner('a')\nif os.fork(): os.wait()\nelse: a.name = 'child'"
    assert lines_at_exit(program) == (["a"], "")
