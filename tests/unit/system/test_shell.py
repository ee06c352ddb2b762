"""Why an engine's command cannot be started."""

from __future__ import annotations

from infini_run.system.shell import find_program, missing_text

ANOTHER = "use another Python (--remote_python, --python of infini-job)"


def test_missing_command_of_an_engine_is_explained(tmp_path):
    python = tmp_path / "python3"
    assert missing_text("srun") == "srun is not on PATH, and --engine needs it"
    assert missing_text(str(python)) == f"{python} cannot be started: it does not exist; {ANOTHER}"
    python.touch(mode=0o600)
    assert find_program(str(python), "/usr/bin") == ""
    assert missing_text(str(python)) == f"{python} cannot be started: this user may not execute it; {ANOTHER}"
