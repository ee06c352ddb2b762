"""With the real PyTorch: what works under torchrun works here, and is told better when it does not.

Run by `make torch` in an environment that has torch; elsewhere skipped. On several hosts: test_many_ssh, _slurm.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from infini_run.options.table import TABLE
from tests.support.command import CHILDREN, Command
from tests.support.elastic_training import await_start, await_step, final_loss, kill_rank, training
from tests.support.paths import ROOT
from tests.unit.options.test_torchrun import DOCUMENTED

pytestmark = pytest.mark.torch
EXAMPLE = str(ROOT / "examples" / "ddp.py")
RANK = str(CHILDREN / "torch_rank.py")
LIMIT_S = 300.0  # importing torch takes its time on a busy machine
OPTIONS = """
import json
from torch.distributed.run import get_args_parser

actions = [action for action in get_args_parser()._actions if action.option_strings]
print(json.dumps([[action.option_strings, action.dest, type(action).__name__] for action in actions]))
"""


def said(command):
    """The JSON lines of all ranks."""
    assert command.wait(LIMIT_S) == 0, command.err
    return [json.loads(line) for line in command.out.splitlines()]


def test_every_option_of_the_installed_torchrun_is_in_the_table_with_its_variable():
    done = subprocess.run([sys.executable, "-c", OPTIONS], capture_output=True, text=True, check=True)
    theirs = json.loads(done.stdout)
    assert len(theirs) > 30
    found = {dest: f"PET_{dest.upper()}" if kind in ("env", "check_env") else "" for _, dest, kind in theirs}
    documented = {name: variable for name, (variable, _) in DOCUMENTED.items()}
    assert found.items() <= documented.items()  # which has those of newer ones, too (test_torchrun.py)
    spellings = {word.lstrip("-").replace("-", "_") for words, _, _ in theirs for word in words}
    assert spellings <= TABLE.keys()


def test_training_reaches_its_accuracy_with_the_losses_that_torchrun_gets(infini_run):
    ours = infini_run("--standalone", "--nproc_per_node=2", EXAMPLE, env=dict(os.environ, OMP_NUM_THREADS="1"))
    assert ours.wait(LIMIT_S) == 0, ours.err
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", EXAMPLE]
    theirs = subprocess.run([sys.executable, *words], capture_output=True, check=True, timeout=LIMIT_S)
    assert ours.out == theirs.stdout
    lines = ours.out.decode().splitlines()
    losses = [float(line.split()[-1]) for line in lines if line.startswith("epoch ")]
    assert losses[-1] < 0.2 * losses[0]
    assert float(lines[-1].split()[1]) >= 0.95


def test_a_training_with_checkpoints_goes_on_under_both_launchers_and_ends_with_the_same_loss(infini_run, tmp_path):
    """A rank is killed in each of two runs; in the third one none is. Ours starts all again by itself; torchrun is
    started again, for gloo finds the addresses of the last attempt in the store that its next one shares."""
    flags = ("--standalone", "--nproc_per_node=2")
    ours = infini_run(*flags, "--max_restarts=1", "--restart_delay=0", *training(tmp_path / "ours"))
    _kill_one(ours)
    assert await_start(ours, 1) >= 100
    losses = [final_loss(ours)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *flags, *training(tmp_path / "theirs")]
    theirs = Command(torchrun)
    try:
        _kill_one(theirs)
        assert theirs.wait(LIMIT_S) == 1
        theirs = Command(torchrun)
        assert await_start(theirs, 0) >= 100
        losses.append(final_loss(theirs))
    finally:
        theirs.insist(signal.SIGTERM)
        theirs.close()
    losses.append(final_loss(infini_run(*flags, *training(tmp_path / "whole"))))
    assert len(set(losses)) == 1, losses


def _kill_one(command):
    await_step(command, 0, 100)
    kill_rank(1)


def test_two_launches_at_once_meet_by_their_environment_and_not_each_other(infini_run):
    both = [infini_run("--standalone", "--nproc_per_node=2", RANK, "meet") for _ in range(2)]
    ports = []
    for command in both:
        found = sorted(said(command), key=lambda one: one["rank"])
        ports.append(found[0].pop("port"))
        assert found[1].pop("port") == ports[-1]
        assert found == [
            {"rank": r, "world_size": 2, "total": 3, "is_launched": True, "infini_train": [1, 2, r, r, 2]}
            for r in (0, 1)
        ]
    assert ports[0] != ports[1]


def test_accelerate_and_lightning_find_their_way_by_the_environment(infini_run):
    found = said(infini_run("--standalone", "--nproc_per_node=2", RANK, "detect"))
    for rank, one in enumerate(sorted(found, key=lambda one: one["accelerate"])):
        host, port = one.pop("endpoint")
        assert (host, port > 0) == ("127.0.0.1", True)
        assert one == {
            "accelerate": [rank, rank, 2, "gloo"],
            "is_lightnings": True,
            "lightning": [rank, rank, 0, 2],
            "creates_processes": False,
        }


def test_transformers_trainer_trains_one_model_on_all_ranks(infini_run):
    env = dict(os.environ, HF_HUB_OFFLINE="1")
    command = infini_run("--standalone", "--nproc_per_node=2", str(ROOT / "examples/trainer.py"), env=env)
    assert command.wait(LIMIT_S) == 0, command.err
    last = command.out.decode().splitlines()[-1]
    told = re.fullmatch(r"loss (\d+\.\d+) after 64 steps of 2 ranks", last)  # 256 sequences, 2 x 8 at a time, 4 times
    assert told is not None, last
    assert float(told[1]) < 0.5


def test_what_record_wrote_is_in_the_report_with_the_rank_and_in_ten_lines(infini_run, tmp_path):
    log = f"--log_dir={tmp_path}"
    command = infini_run("--standalone", "--nproc_per_node=2", log, "--console=none", RANK, "fail")
    assert command.wait(LIMIT_S) == 1
    lines = command.err.decode().splitlines()
    assert lines[0].startswith("infini-run: rank 1 on ")
    assert ": exit code 1 (" in lines[0]
    assert "  error: RuntimeError: loss is nan" in lines
    assert len(lines) <= 10
