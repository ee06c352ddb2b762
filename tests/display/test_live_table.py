"""--live on real terminals: what a person sees, and in which state the terminal is left, whatever ends us."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import termios

import pytest

from tests.support.command import COMMAND, altered, play
from tests.support.processes import is_alive
from tests.support.pty_window import Window
from tests.support.waiting import until

HEAD = "RANK STATE"
LIVE = ("--live",)
WITH_DRIVER = [*altered({"watchdog.gpu_reading._DRIVERS": ("/dev/null",)}), *COMMAND]  # as if NVIDIA's were here


@pytest.fixture
def window():
    opened = []

    def make(*words, **options):
        opened.append(Window(*words, **options))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def heads(window):
    return sum(HEAD in line for line in window.text)


def shows(window, *states):
    """Whether ranks 0, 1, ... are in these states."""
    return all(window.row(rank)[1:2] == [state] for rank, state in enumerate(states))


def has_cpu(window, rank):
    """Whether a sample was taken that says how much CPU the rank uses: not in its first moment."""
    words = window.row(rank)
    return words[4:5] != [] and words[4].endswith("%")


def assert_in_order(window):
    """Nothing of the terminal was changed, and the cursor stands at the beginning of a line below everything."""
    assert termios.tcgetattr(window.slave) == window.modes
    assert b"\x1b[?" not in window.seen, "a mode of the terminal was changed"
    assert window.screen.cursor.x == 0
    assert not any(window.text[window.screen.cursor.y :])


def test_each_rank_has_a_line_with_what_it_is_and_what_it_wrote_last(window, bell):
    ranks = [
        "sh",
        "-c",
        f'echo "first $RANK"; echo "rank $RANK says $((1 + 1))"; echo $RANK $$ > {bell.path}; exec cat',
    ]
    one = window(*LIVE, "--nproc_per_node=3", "--stdin=all", *ranks)
    pids = dict(line.split() for line in bell.hear(3))
    one.see(lambda: shows(one, "running", "running", "running") and all(has_cpu(one, rank) for rank in range(3)))
    one.see(lambda: all("says" in one.row(rank) for rank in range(3)))
    assert heads(one) == 1
    for rank in range(3):
        words = one.row(rank)
        assert words[2] == pids[str(rank)]
        assert words[-4:] == ["rank", str(rank), "says", "2"]
        assert words[3].startswith("0:")
        assert words[4].endswith("%")
        assert words[5].endswith(("K", "M"))
    one.type("\x04")
    assert one.wait() == 0
    assert shows(one, "done", "done", "done")
    assert heads(one) == 1
    assert "3 done" in one.text[0]
    assert_in_order(one)


def test_an_unended_line_is_shown_and_a_failure_is_told_below_the_table(window):
    words = ["sh", "-c", "printf '%s' 'loading 10%' >&2; [ $RANK = 1 ] && exit 3; exec sleep 1000"]
    one = window(*LIVE, "--nproc_per_node=2", *words)
    assert one.wait() == 3
    table = next(i for i, line in enumerate(one.text) if HEAD in line)
    told = next(i for i, line in enumerate(one.text) if line.startswith("infini-run: rank 1"))
    assert "1 failed, 1 stopped" in one.text[table - 1]
    assert one.row(0)[1] == "stopped"
    assert one.row(1)[1:3] == ["exit", "3"]
    assert one.row(1)[-2:] == ["loading", "10%"]
    assert told == table + 3
    assert_in_order(one)


def test_readiness_and_a_suspended_rank_are_states(window):
    one = window(*LIVE, "--nproc_per_node=2", *play("@1", "notify=READY=1;STATUS=epoch 3", "@*", "wait"))
    one.see(lambda: shows(one, "running", "ready"))
    one.see(lambda: one.row(1)[-2:] == ["epoch", "3"])  # it wrote nothing
    os.kill(int(one.row(0)[2]), signal.SIGSTOP)
    one.see(lambda: shows(one, "suspended", "ready"))
    os.kill(one.pid, signal.SIGTERM)
    assert one.wait() == 143


def test_status_is_shown_beside_the_output(window, bell):
    words = play("say=loss", "notify=STATUS=epoch 3", "@1", "exit=3", "@*", "wait")
    one = window(*LIVE, "--nproc_per_node=2", "--keep_going", *words)
    one.see(lambda: one.row(0)[6:10] == ["epoch", "3", "|", "loss"])
    one.see(lambda: one.row(1)[-3:] == ["|", "epoch", "3"])  # it has ended: the line may say why
    one.type("\x03")
    assert one.wait() == 3


def test_restarted_rank_shows_nothing_of_the_last_attempt(window, bell):
    """Its status stands first again, as that of any rank that runs."""
    says = shlex.join(map(str, play("notify=STATUS=new")))
    second = f"{says}; read go < {bell.path}; echo second; exec sleep 1000"
    sampler = f"test $TORCHELASTIC_RESTART_COUNT = 0 && {{ echo first; exit 3; }}; {second}"
    flags = ("--restart_scope=program", "--restart_delay=1s", "--program=a", "sleep", "1000", ":")
    one = window(*LIVE, *flags, "--program=b", "--max_restarts=1", "sh", "-c", sampler)

    def ends(*words):
        rows = [line.split() for line in one.text if line.startswith("b ")]
        return bool(rows) and rows[-1][2] == "running" and rows[-1][7:] == [*words]

    one.see(lambda: ends("new"))
    bell.ring("go")
    one.see(lambda: ends("new", "|", "second"))
    os.kill(one.pid, signal.SIGTERM)
    assert one.wait() == 143


def test_first_frame_has_no_use_of_cpu_from_ticks(window):
    one = window(*LIVE, "--nproc_per_node=2", sys.executable, "-c", "while True: pass")
    one.see(lambda: has_cpu(one, 0) and has_cpu(one, 1))
    shares = [int(share) for share in re.findall(rb"\b(\d+)%", one.seen)]
    assert max(shares) < 150
    one.type("\x03")
    assert one.wait() == 130


INTERRUPTED = """
import os, time
print("epoch 3 of rank", os.environ["RANK"], flush=True)
def train():
    time.sleep(1000)
train()
"""


@pytest.mark.parametrize(("count", "lines", "seen"), [(1, 24, 1), (4, 24, 4), (12, 10, 6)])
def test_interrupted_ranks_keep_their_last_line_and_order(window, tmp_path, count, lines, seen):
    script = tmp_path / "train.py"
    script.write_text(INTERRUPTED)
    one = window(*LIVE, f"--nproc_per_node={count}", script, lines=lines)
    names = [str(rank) for rank in range(seen)]

    def shown():
        """The ranks that have a line, and the rank that the line names: Python writes it in pieces."""
        rows = [line.split() for line in one.text if "epoch 3 of rank" in line]
        return [words[0] for words in rows], [words[-1] for words in rows]

    one.see(lambda: shown() == (names, names))
    one.type("\x03")
    assert one.wait() == 130
    assert shown() == (names, names)
    assert not any("KeyboardInterrupt" in line for line in one.text[one.text.index(_head(one)) :])


HANGS = "spin() { while :; do :; done; }; [ $RANK = 1 ] && spin; trap spin USR1; sleep 1000 & wait"


def test_a_hang_is_a_state_until_the_rank_uses_cpu_and_its_look_is_told_above_the_table(window):
    one = window(*LIVE, "--nproc_per_node=2", "--hang_timeout=300ms", "sh", "-c", HANGS)
    one.see(lambda: shows(one, "hung", "running"))
    one.see(lambda: any("rank 0" in line and "hung" in line for line in one.text[: one.text.index(_head(one))]))
    os.kill(int(one.row(0)[2]), signal.SIGUSR1)
    one.see(lambda: shows(one, "running", "running"))
    one.type("\x03")
    assert one.wait() == 130


@pytest.mark.parametrize(("key", "program", "code"), [
    ("\x03", ["sh", "-c", "echo up; exec sleep 1000"], 130),
    ("\x1c", ["sh", "-c", "ulimit -c 0; echo up; exec sleep 1000"], 131),
    ("\x03", ["sh", "-c", "trap 'exit 130' INT; echo up; while :; do sleep 1000; done"], 130),
])  # fmt: skip
def test_a_lone_rank_that_the_user_has_interrupted_has_not_failed(window, key, program, code):
    one = window(*LIVE, *program)
    one.see(lambda: one.row(0)[-1:] == ["up"])
    one.type(key)
    assert one.wait() == code
    assert one.row(0)[1] == "interrupted"
    assert "1 interrupted" in one.text[one.text.index(_head(one)) - 1]
    assert not any("failed" in line for line in one.text)
    assert_in_order(one)


def test_a_lone_rank_that_was_killed_by_another_has_failed(window):
    one = window(*LIVE, "sh", "-c", "echo up; kill -TERM $$; exec sleep 1000")
    assert one.wait() == 143
    assert one.row(0)[1] == "SIGTERM"
    assert "1 failed" in one.text[one.text.index(_head(one)) - 1]


def _head(window):
    return next(line for line in window.text if HEAD in line)


@pytest.mark.parametrize("key", ["\x03", "\x1c"])
def test_a_key_that_ends_it_leaves_the_terminal_in_order(window, key):
    one = window(*LIVE, "--nproc_per_node=2", *play("wait"))
    one.see(lambda: shows(one, "running", "running"))
    one.type(key)
    assert one.wait() == {"\x03": 130, "\x1c": 131}[key]
    assert all(one.row(rank)[1] in ("stopped", "SIGINT", "SIGQUIT") for rank in range(2))
    assert any("stopping" in line for line in one.text)  # the sentence stays
    assert_in_order(one)


def test_sigkill_leaves_the_terminal_in_order_too(window):
    one = window(*LIVE, "--nproc_per_node=2", *play("wait"))
    one.see(lambda: shows(one, "running", "running"))
    ranks = [int(one.row(rank)[2]) for rank in range(2)]
    one.process.kill()
    one.wait()
    until(lambda: not any(map(is_alive, ranks)))
    assert heads(one) == 1
    assert_in_order(one)


def test_what_was_on_the_screen_stays_there(window):
    before = "".join(f"line {i}\r\n" for i in range(8))
    one = window(*LIVE, "--nproc_per_node=2", *play("say=hello", "exit=0"), before=before)
    assert one.wait() == 0
    assert [line for line in one.text if line.startswith("line")] == [f"line {i}" for i in range(8)]
    assert one.text.index(_head(one)) == 9


def test_a_table_at_the_bottom_scrolls_once(window):
    one = window(*LIVE, "--nproc_per_node=4", "--stdin=all", "cat", lines=10, before="old\r\n" * 9)
    for word in ("one", "two", "three"):
        one.see(lambda: heads(one) == 1)
        one.type(f"{word}\n")
        one.see(lambda w=word: all(one.row(rank)[-1:] == [w] for rank in range(4)))
    one.type("\x04")
    assert one.wait() == 0
    assert heads(one) == 1


@pytest.mark.parametrize("size", [(60, 24), (40, 8), (140, 30), (100, 6)])
def test_a_resized_window_is_drawn_anew(window, size):
    one = window(*LIVE, "--nproc_per_node=3", *play("say=ready", "wait"))
    one.see(lambda: shows(one, "running", "running", "running"))
    one.resize(*size)
    title = "infini-run, 3 ranks"
    before = len(one.seen)
    one.see(lambda: HEAD.encode() in one.seen[before:].replace(b"\x1b[1m", b"").replace(b"\x1b[0m", b""))

    def is_drawn_anew():
        """What was on its way for the old size may be seen first, drawn twice."""
        return (
            heads(one) == 1
            and all([words[1:2] for words in one.rows(rank)] == [["running"]] for rank in range(3))
            and one.text[-1] == ""
        )

    one.see(is_drawn_anew)
    assert sum(line.startswith(title) for line in one.text) == 1
    one.type("\x03")
    assert one.wait() == 130


@pytest.mark.parametrize("size", [(1, 1), (2, 2), (8, 3), (20, 4), (30, 5), (80, 2)])
def test_a_terminal_may_be_tiny(window, size):
    columns, lines = size
    one = window(*LIVE, "--nproc_per_node=8", "--stdin=all", "cat", columns=columns, lines=lines)
    one.see(lambda: lines < 2 or columns < 2 or one.text[0].startswith("infini-run"[: columns - 2]))
    one.type("hello\n\x04")
    assert one.wait() == 0
    assert_in_order(one)


def test_more_ranks_than_lines_show_who_failed_and_count_the_rest(window):
    script = "case $RANK in 37) exit 5;; 11) while :; do :; done;; *) echo here; exec sleep 1000;; esac"
    one = window(*LIVE, "--nproc_per_node=50", "--keep_going", "sh", "-c", script, lines=12)
    one.see(lambda: one.row(37)[1:3] == ["exit", "5"] and one.row(11)[1:2] == ["running"])
    table = one.text.index(_head(one))
    assert one.text[table + 1].split()[0] == "37"
    one.see(lambda: one.text[table + 2].split()[:2] == ["11", "running"])  # busiest of those that live
    rest = one.text[11 - 1]
    assert rest.startswith("... and 42 more: 42 running")
    assert one.text[11] == ""
    one.type("\x03")
    assert one.wait() == 5


def test_what_a_rank_writes_cannot_steer_the_terminal(window):
    evil = r"printf '\033[2J\033]0;owned\007\033[1mbold\033[0m [red]x[/red] \302\233 \377end\n'; exec cat"
    one = window(*LIVE, "--stdin=0", "--nproc_per_node=2", "sh", "-c", evil)
    one.see(lambda: "end" in " ".join(one.row(0)))
    assert b"\x1b[2J" not in one.seen
    assert b"\x1b]" not in one.seen
    assert b"\x07" not in one.seen
    assert "[red]x[/red]" in " ".join(one.row(0))
    one.type("\x04")
    assert one.wait() == 0


def test_a_terminal_that_hangs_up_does_not_end_a_job_that_is_not_of_it(window, bell, tmp_path):
    out = tmp_path / "out"
    words = ["sh", "-c", f"echo ready; read line < {bell.path}; echo $line > {out}"]
    one = window(*LIVE, *words, has_job=False)
    one.see(lambda: one.row(0)[-1:] == ["ready"])
    one.hang_up()
    with open(bell.path, "w") as file:
        file.write("on\n")
    assert one.process.wait() == 0
    assert out.read_text() == "on\n"


def test_a_terminal_that_nobody_reads_does_not_hold_the_job_up(window):
    one = window(*LIVE, "--nproc_per_node=4", "sh", "-c", "i=0; while [ $i -lt 20000 ]; do echo $i; i=$((i+1)); done")
    assert one.process.wait(60) == 0  # not a byte was read
    one.wait()
    assert heads(one) == 1


def test_lines_of_ours_stay_above_the_table(window):
    one = window(*LIVE, "--verbose", "--nproc_per_node=2", *play("notify=READY=1", "exit=0"))
    assert one.wait() == 0
    table = one.text.index(_head(one))
    for line in ("rank 0 is ready", "rank 1 is ready"):
        assert any(line in above for above in one.text[:table])
    assert heads(one) == 1


# ---- whether there is a table


def test_without_a_terminal_it_says_so_and_goes_on(infini_run):
    command = infini_run(*LIVE, "--nproc_per_node=2", *play("say=hello", "exit=0"))
    assert command.wait() == 0
    assert command.out.count(b"hello") == 2
    assert command.err == b"infini-run: --live: stderr is not a terminal; continuing without the table\n"


def test_a_dumb_terminal_is_none(window):
    one = window(*LIVE, *play("say=hello", "exit=0"), TERM="dumb")
    assert one.wait() == 0
    assert b"not a terminal" in one.seen
    assert b"hello" in one.seen
    assert not heads(one)


@pytest.mark.parametrize(
    ("flags", "environ", "drawn"),
    [
        (["--console=none"], {}, True),
        (["--console=none", "--live=auto"], {}, True),
        (["--console=none", "--nolive"], {}, False),
        (["--console=none"], {"INFINI_RUN_LIVE": "off"}, False),
        (["--nolive"], {}, False),
        ([], {}, False),
        ([], {"INFINI_RUN_LIVE": "on"}, True),
        (["--console=prefix"], {"INFINI_RUN_LIVE": "on"}, False),
        (["--live"], {"INFINI_RUN_CONSOLE": "prefix"}, True),
        (["--live", "--console=none"], {}, True),
    ],
)
def test_who_gets_a_table(window, flags, environ, drawn):
    one = window(*flags, *play("say=hello", "exit=0"), **environ)
    assert one.wait() == 0
    assert (heads(one) == 1) == drawn


def test_a_table_and_lines_on_one_screen_contradict_each_other(infini_run):
    command = infini_run("--live", "--console=prefix", "true")
    assert command.wait() == 2
    assert command.err.startswith(b"infini-run: --live conflicts with --console=prefix: ")
    assert command.err.count(b"\n") == 1


@pytest.fixture
def without_rich(tmp_path):
    """As where the extra is not installed: the import fails."""
    (tmp_path / "rich").mkdir()
    (tmp_path / "rich/__init__.py").write_text("raise ImportError('no rich')\n")
    return {"PYTHONPATH": str(tmp_path)}


def test_the_extra_that_is_missing_is_named(window, without_rich):
    one = window(*LIVE, *play("say=hello"), **without_rich)
    assert one.wait() == 2
    text = " ".join(one.text)
    assert text.startswith("infini-run: --live: needs rich; run pip install 'infini-run[live]'")
    assert b"hello" not in one.seen


def test_auto_does_without_rich_in_silence(window, without_rich):
    one = window("--console=none", *play("say=hello", "exit=0"), **without_rich)
    assert one.wait() == 0
    assert one.seen == b""


# ---- jobs of a shell


@pytest.fixture
def shell(window):
    one = window(program=["bash", "--norc", "--noprofile", "--noediting", "-i"], PS1="next> ", HISTFILE="/dev/null")
    one.see(lambda: "next>" in one.text[0])
    yield one
    one.type("\x04")


def test_in_the_background_nothing_is_drawn_until_fg(shell, bell):
    ring = ["sh", "-c", f"echo up > {bell.path}; echo said; exec sleep 1000"]
    shell.type(shlex.join([*COMMAND, "--live", "--nproc_per_node=2", *ring]) + " &\n")
    bell.hear(2)
    shell.type("echo at''tention\n")
    shell.see(lambda: "attention" in shell.text)
    assert heads(shell) == 0
    shell.type("fg\n")
    shell.see(lambda: heads(shell) == 1 and shows(shell, "running", "running"))
    assert "attention" in shell.text
    shell.type("\x1a")
    shell.see(lambda: any("Stopped" in line for line in shell.text))
    shell.type("fg\n")
    shell.see(lambda: heads(shell) == 2)  # what was drawn before Ctrl-Z stays, above what the shell wrote
    shell.type("\x03")
    shell.see(lambda: shell.text[shell.screen.cursor.y].startswith("next>"))
    shell.type("echo code=$?\n")
    shell.see(lambda: any("code=130" in line for line in shell.text))


# ---- from Python


def test_a_program_may_show_the_table(window):
    code = (
        "import infini_run as ir, sys; print(ir.run(sys.argv[1:], nproc_per_node=2, live=True).world_size, 'ranks')"
    )
    one = window("-c", code, *play("say=hello", "exit=0"), program=[sys.executable])
    assert one.wait() == 0
    assert shows(one, "done", "done")
    assert one.row(1)[-3] == "hello"
    assert one.text[one.text.index(_head(one)) + 3] == "2 ranks"


def test_a_program_that_did_not_ask_has_its_terminal_to_itself(window):
    code = "import infini_run as ir, sys; print(ir.run(sys.argv[1:], console='none').exit_code)"
    one = window("-c", code, *play("say=hello", "exit=0"), program=[sys.executable])
    assert one.wait() == 0
    assert one.seen == b"0\r\n"


def test_a_program_that_dropped_its_launcher_keeps_no_descriptor(window, tmp_path):
    code = (
        "import infini_run as ir, os, sys\n"
        "before = len(os.listdir('/proc/self/fd'))\n"
        "for _ in range(3):\n"
        "    try:\n        ir.run(['/nonexistent'], live=True, trace='t.json')\n"
        "    except ir.ProgramMissing:\n        pass\n"
        "    ir.run(sys.argv[1:], live=True, trace='t.json')\n"
        "print('left', len(os.listdir('/proc/self/fd')) - before, os.listdir('.'))"
    )
    one = window("-c", code, "sleep", "0.1", program=["env", "-C", str(tmp_path), sys.executable])
    assert one.wait() == 0
    assert "left 0 ['t.json']" in one.text[one.screen.cursor.y - 1]


@pytest.mark.parametrize("where", ["", ", hosts=['nowhere']"], ids=["here", "hosts"])
def test_launch_whose_events_have_no_place_keeps_no_descriptor(where, window):
    code = (
        "import infini_run as ir, os\n"
        "before = len(os.listdir('/proc/self/fd'))\n"
        "for _ in range(3):\n"
        f"    try:\n        ir.run(['true'], live=True, events='/nonexistent/e'{where})\n"
        "    except ir.UsageError:\n        pass\n"
        "print('left', len(os.listdir('/proc/self/fd')) - before)"
    )
    one = window("-c", code, program=[sys.executable])
    assert one.wait() == 0
    assert "left 0" in one.text[one.screen.cursor.y - 1]


# ---- GPUs


def test_gpus_have_columns_where_nvml_is(window, busy_gpus, tmp_path):
    gpus = tmp_path / "gpus"
    gpus.write_text("GPU-aa 70 3000\nGPU-bb 20 500\n")
    environ = {"LD_LIBRARY_PATH": busy_gpus, "BUSY_GPUS": str(gpus)}
    one = window(*LIVE, "--nproc_per_node=2", *play("wait"), program=WITH_DRIVER, **environ)
    one.see(lambda: shows(one, "running", "running"))
    assert not any("GPU" in line for line in one.text)  # no rank uses one
    pid = int(one.row(1)[2])
    (tmp_path / "new").write_text(f"GPU-aa 70 3000\nGPU-bb 20 500 {pid}:300\n")
    os.rename(tmp_path / "new", gpus)
    one.see(lambda: one.row(1)[6:8] == ["300M", "20%"])
    assert "GPUMEM  GPU" in _head(one)
    assert len(one.row(0)) == 6
    one.type("\x03")
    assert one.wait() == 130


def test_driver_that_hangs_does_not_hold_the_launcher(window, busy_gpus, tmp_path):
    """What NVML asks never answers, as with a GPU that has fallen off the bus."""
    os.mkfifo(tmp_path / "gpus")
    environ = {"LD_LIBRARY_PATH": busy_gpus, "BUSY_GPUS": str(tmp_path / "gpus")}
    one = window(*LIVE, "--nproc_per_node=2", *play("wait"), program=WITH_DRIVER, **environ)
    one.see(lambda: has_cpu(one, 0) and has_cpu(one, 1))
    with open(tmp_path / "gpus", "w"):  # not before a reader waits for it
        os.kill(one.pid, signal.SIGTERM)
        assert one.wait() == 143


@pytest.mark.parametrize(
    ("boards", "environ", "shown"),
    [
        (("GPU-aa", "GPU-bb"), {}, None),  # unequal boards, which CUDA may sort as it likes
        (("GPU-aa", "GPU-bb"), {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, (["500M", "20%"], ["2.9G", "70%"])),
        (("GPU-a1", "GPU-a2"), {}, (["500M", "20%"], ["2.9G", "70%"])),
        (("GPU-aa", "GPU-bb"), {"CUDA_VISIBLE_DEVICES": "GPU-b,GPU-a"}, (["500M", "20%"], ["2.9G", "70%"])),
    ],
)
def test_a_rank_is_shown_the_gpus_that_it_was_given_or_none(window, busy_gpus, tmp_path, boards, environ, shown):
    gpus = tmp_path / "gpus"
    gpus.write_text(f"{boards[0]} 70 3000\n{boards[1]} 20 500\n")  # whose pids are told to nobody here
    environ = {"CUDA_VISIBLE_DEVICES": "1,0", **environ, "LD_LIBRARY_PATH": busy_gpus, "BUSY_GPUS": str(gpus)}
    one = window(*LIVE, "--nproc_per_node=2", "--gpus_per_proc=1", *play("wait"), **environ)
    one.see(lambda: has_cpu(one, 0) and has_cpu(one, 1))
    if shown is None:
        assert not any("GPU" in line for line in one.text)
    else:
        one.see(lambda: (one.row(0)[6:8], one.row(1)[6:8]) == shown)
    one.type("\x03")
    assert one.wait() == 130


# ---- what it costs


def test_nothing_is_imported_and_no_clock_runs_without_it(tmp_path):
    code = """
import json, sys
from infini_run import cli
from infini_run.node import launch
def told(self, group, timeout_s, also):
    seen.append(timeout_s)
    return real(self, group, timeout_s, also)
seen, real = [], launch.NodeLaunch._wait
launch.NodeLaunch._wait = told
import infini_run.lean_os as os
def leave(code):
    ours = sorted(m for m in sys.modules if m.split(".")[0] in ("infini_run", "rich"))
    print(json.dumps([code, seen, ours]), flush=True)
    exit_(code)
exit_, os._exit = os._exit, leave
sys.argv = ["infini-run", "--console=none", *sys.argv[1:]]
cli.main()
"""
    done = subprocess.run([sys.executable, "-c", code, "sleep", "0.1"], capture_output=True, text=True, check=True)
    exit_code, waits, modules = json.loads(done.stdout)
    assert exit_code == 0
    assert set(waits) == {None}
    assert not {
        "infini_run.display.observers",
        "infini_run.display.live_table",
        "infini_run.display.chrome_trace",
        "rich",
    } & set(modules)
    trace = [sys.executable, "-c", code, f"--trace={tmp_path}/t.json", "sleep", "0.1"]
    exit_code, waits, modules = json.loads(subprocess.run(trace, capture_output=True, text=True, check=True).stdout)
    assert exit_code == 0
    assert "infini_run.display.chrome_trace" in modules
    assert "infini_run.display.live_table" not in modules


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="a PID namespace of its own needs root")
def test_an_isolated_job_has_a_table_too(window):
    one = window(*LIVE, "--isolate", "--nproc_per_node=2", *play("wait"))
    one.see(lambda: shows(one, "running", "running"))
    one.resize(70, 24)
    one.see(lambda: len(one.seen.split(b"LAST LINE")) > 2 and heads(one) == 1)
    one.type("\x03")
    assert one.wait() == 130
    assert shows(one, "stopped", "stopped")
    assert_in_order(one)


def test_imports_of_preload_have_a_line_before_the_ranks_and_below_them(window, tmp_path):
    (tmp_path / "slow_import.py").write_text(f"open({str(tmp_path / 'gate')!r}).read()\n")
    (tmp_path / "rank.py").write_text("import signal\nsignal.pause()\n")
    os.mkfifo(tmp_path / "gate")
    words = ("--nproc_per_node=2", "--preload=slow_import", sys.executable, tmp_path / "rank.py")
    one = window(*LIVE, *words, PYTHONPATH=str(tmp_path))
    one.see(lambda: "infini-run: importing slow_import" in one.text)
    (tmp_path / "gate").write_text("")
    one.see(lambda: any(line.startswith("preloaded slow_import in ") for line in one.text))
    one.see(lambda: shows(one, "running", "running"))
    one.type("\x03")
    assert one.wait() == 128 + signal.SIGINT
