"""The example of an inference server: it serves, streams, cancels, and ends with all its workers."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.paths import ROOT
from tests.support.waiting import LIMIT_S

pytestmark = pytest.mark.xdist_group("inference")  # `alone` is made once
PROGRAM = ROOT / "examples/inference.py"


def serve(*flags):
    words = [sys.executable, str(PROGRAM), "--files=8", *flags]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def alone():
    """What one worker writes, without a group."""
    return serve("--workers=1", "--length=40")


def test_each_prompt_is_answered_in_full(alone):
    first, *texts = alone
    assert first.startswith("1 workers are ready, with ")
    for text, prompt in zip(texts, ("> import ", "> def ", "> class "), strict=True):
        assert text.startswith(prompt)
        assert len(text.replace("\\n", "n")) == len(prompt) + 40


@pytest.mark.parametrize("workers", [2, 3])
def test_a_model_in_shares_writes_what_the_whole_one_does(alone, workers):
    assert serve(f"--workers={workers}", "--length=40")[1:] == alone[1:]


def test_a_text_that_nobody_wants_any_more_ends_in_its_middle(alone):
    *before, last = serve("--workers=2", "--length=100000", "--prompts", "import ", "--cancel-after=24")
    assert len(before) == 1
    assert last.startswith(alone[1][:20])
    assert last.endswith("... (cancelled)")
    assert len(last) < 1000


def test_an_empty_prompt_is_refused_before_anything_starts():
    words = [sys.executable, str(PROGRAM), "--prompts", "import ", ""]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "--prompts: an empty prompt has no letter to go on from\n"
