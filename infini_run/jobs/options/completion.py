"""What makes bash, zsh and fish complete infini-job: its verbs, their flags, and the names of jobs."""

from __future__ import annotations

from infini_run.jobs.options.help import SHORT
from infini_run.jobs.options.table import VERBS
from infini_run.options import completion
from infini_run.options.completed_values import CompletedCommand

JOB = CompletedCommand(
    name="infini-job",
    flags=VERBS,
    verbs=SHORT,
    words={"program": ("submit",), "jobs": ("status", "logs", "top", "follow", "stacks", "cancel", "forget")},
)


def script(shell: str) -> str:
    """Return the completion script for bash, zsh, or fish."""
    return completion.script(shell, JOB)
