"""Jobs from Python: what `ir.submit` and its Job refuse, in our words and before anything is made."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import infini_run as ir
from tests.jobs.test_job_status import made


@pytest.fixture
def submit(local):
    """ir.submit, here; and after a refusal nothing is left."""

    def submit(*args, **kwargs):
        return ir.submit(*args, scheduler="local", dir=local.path, **kwargs)

    return submit


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["echo", 3], "command: 3: expected text; did you mean str(3)?"),
        (["echo", b"x"], "command: b'x': expected text; did you mean os.fsdecode(b'x')?"),
        (["echo", "a\0b"], "command: 'a\\x00b': cannot pass a NUL character in an argument or a variable"),
        (["echo", "\ud800"], "command: '\\ud800': cannot be encoded in an argument or a variable"),
        ("echo hi", "command='echo hi': expected a list, the program and its arguments"),
        ([], "command=[]: expected a list, the program and its arguments"),
    ],
)
def test_a_command_is_refused_as_by_run(submit, local, command, said):
    for call in (submit, ir.run):
        with pytest.raises(ir.UsageError) as caught:
            call(command)
        assert str(caught.value) == said
    assert local.is_empty()


def test_a_command_may_have_paths(submit):
    assert submit([Path("/bin/sh"), "-c", "exit 3"]).wait().code == 3


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"A=B": "3"}, "env: 'A=B': not a variable name; use non-empty text without ="),
        ({"": "3"}, "env: '': not a variable name; use non-empty text without ="),
        ({3: "x"}, "env: 3: not a variable name; use non-empty text without ="),
        ({"A": 3}, "env['A']: 3: expected text; did you mean str(3)?"),
        ({"A": None}, "env['A']: None: expected text; did you mean str(None)?"),
        ({"A": "x\0"}, "env['A']: 'x\\x00': cannot pass a NUL character in an argument or a variable"),
        (["A"], "env=['A']: expected a dict of variables, such as {'NAME': 'value'}"),
        ("A=1", "env='A=1': expected a dict of variables, such as {'NAME': 'value'}"),
    ],
)
def test_an_environment_is_refused_by_all_calls_alike(submit, local, env, said):
    for call in (submit, ir.run, ir.ProcessLauncher):
        with pytest.raises(ir.UsageError) as caught:
            call(["true"], env=env)
        assert str(caught.value) == said
    with pytest.raises(ir.UsageError) as caught:
        ir.Launcher(env=env)
    assert str(caught.value) == said
    assert local.is_empty()


def test_a_variable_may_be_a_path(submit):
    job = submit(["sh", "-c", "echo $PLACE"], env={"PLACE": Path("/tmp")})
    assert job.wait().state == "COMPLETED"
    assert list(job.logs()) == ["[rank 0] /tmp"]


def test_env_goes_with_job_whatever_its_names(submit, monkeypatch):
    """Those of the caller's environment are dropped: a scheduler sets its own."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    job = submit(["true"], slot_type="cpu", env={"CUDA_VISIBLE_DEVICES": "3"})
    assert job.wait().state == "COMPLETED"
    assert b"CUDA_VISIBLE_DEVICES=3" in Path(job.path, "env").read_bytes().split(b"\0")


def test_copy_of_own_environment_brings_no_allocation_with_it(submit, monkeypatch):
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "777")
    job = submit(["true"], slot_type="cpu", env={**os.environ, "SEED": "1"})
    job.wait()
    names = {line.partition(b"=")[0] for line in Path(job.path, "env").read_bytes().split(b"\0")}
    assert b"SEED" in names
    assert not names & {b"SLURM_JOB_ID", b"SLURM_JOB_NODELIST", b"CUDA_VISIBLE_DEVICES"}


@pytest.mark.parametrize("cwd", [b"/tmp", 3, "/tmp\0"])
def test_a_working_directory_is_a_path(submit, local, cwd):
    with pytest.raises(ir.UsageError, match=r"^cwd: "):
        submit(["true"], cwd=cwd)
    assert local.is_empty()


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("request.json", {"command": ["echo", 3]}),
        ("request.json", {"slots": "2"}),
        ("0/phase", {"state": "RUNNING", "since_s": "now"}),
        ("0/phase", {"unknown": 1}),
        ("exit", {"unknown": 1}),
    ],
)
def test_a_job_that_cannot_be_read_hides_no_other(local, file, content):
    good = made(local.path, "ir-00000000aa", scheduler="local")
    bad = made(local.path, "ir-00000000bb", scheduler="local")
    bad.begin()
    path = Path(bad.path) / file
    if file == "request.json":
        whole = json.loads(path.read_text())
        content = whole | {"request": whole["request"] | content}
    path.write_text(json.dumps(content))
    for verb in ("list", "status"):
        done = local.call(verb)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(good.name)
        (line,) = done.stderr.splitlines()
        assert bad.path in line


@pytest.mark.parametrize(("array", "tasks"), [([1, 2], (1, 2)), (range(3), (0, 1, 2)), ((4,), (4,)), (5, (5,))])
def test_an_array_may_be_a_list_of_indices(submit, array, tasks):
    job = submit(["true"], array=array)
    assert job.submission.tasks == tasks
    assert job.wait().state == "COMPLETED"


def test_what_is_no_name_and_no_time_is_refused(submit, local):
    for name in (None, 3, b"ir-00000000aa"):
        with pytest.raises(ir.UsageError, match=r": not a job name \(ir-0123456789\)"):
            ir.find_job(name, dir=local.path)
    with pytest.raises(ir.UsageError, match="names='ir-00000000aa': expected a list of texts"):
        ir.find_jobs("ir-00000000aa", dir=local.path)
    job = submit(["true"])
    for timeout_s in ("5s", True):
        with pytest.raises(ir.UsageError, match="give a number of seconds, or None for no limit"):
            job.wait(timeout_s)
    assert job.wait(60).state == "COMPLETED"
