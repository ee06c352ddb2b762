"""The doctor of a test: what the command answers, as programs read it."""

from __future__ import annotations

import json

import pytest

from tests.support.nvml import driver, stub_folder

__all__ = ("driver", "stub_folder")


class Answer:
    """An answer of --doctor=json."""

    def __init__(self, command, code):
        self.code = code
        self.content = json.loads(command.out)
        self.machines = {machine["name"]: machine for machine in self.content["machines"]}

    def findings(self, machine="this machine"):
        return {finding["name"]: finding for finding in self.machines[machine]["findings"]}

    def of(self, name, machine="this machine"):
        """The grade and the text of a finding."""
        found = self.findings(machine)[name]
        return found["grade"], found["text"]


@pytest.fixture
def doctor(infini_run):
    """Run the doctor; nothing may come on stderr."""

    def ask(*words, **kwargs):
        command = infini_run("--doctor=json", *words, **kwargs)
        code = command.wait()
        assert command.err == b""
        return Answer(command, code)

    return ask
