"""--preload: what is refused, what starts cold, what restarts do, and that nothing is left of it."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys

import pytest

import infini_run as ir
from tests.support.command import CHILDREN, altered
from tests.support.hidden_proc import hidden
from tests.support.launch_shapes import as_root
from tests.support.processes import is_alive, marked, processes, state_of
from tests.support.waiting import until

COLD = b"infini-run: ranks start cold: "


@pytest.fixture
def module(tmp_path):
    """Write a module that can be preloaded, and return the variables with which it is found."""

    def write(source, name="preloaded"):
        (tmp_path / f"{name}.py").write_text(source)
        return {**os.environ, "PYTHONPATH": str(tmp_path)}

    return write


def run(infini_run, *words, **kwargs):
    command = infini_run(*words, **kwargs)
    return command.wait(), command.out, command.err


def code(text):
    return [sys.executable, "-c", text]


# ---- refused


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["sh", "-c", "true"], b"--preload=decimal: needs a Python program, and sh is not one; drop --preload"),
        ([sys.executable, "-I", "x.py"], b"conflicts with python -I, which ignores the hook in PYTHONPATH; drop one"),
        ([sys.executable, "-uE", "x.py"], b"conflicts with python -E"),
        ([sys.executable, "-X", "utf8", "-S", "-m", "x"], b"conflicts with python -S"),
        ([sys.executable, "-W", "ignore", "-i", "x.py"], b"conflicts with an interactive Python"),
        ([sys.executable, "-u", "-"], b"reads its program from stdin; give a file"),
        ([sys.executable], b"reads its program from stdin; give a file"),
        (["--bind=numa", sys.executable, "x.py"], b"conflicts with --bind=numa"),
        (["--preload=os.,x", sys.executable, "x.py"], b"--preload=os.,x: expected names of modules, such as torch"),
    ],
)  # fmt: skip
def test_preload_is_refused_before_anything_starts(infini_run, words, text):
    command = infini_run("--preload=decimal", *words)
    assert command.wait() == 2
    assert text in command.err
    assert command.err.count(b"\n") == 1


def test_preload_of_missing_module_is_refused(infini_run):
    found = run(infini_run, "--preload=decimal,nosuch", *code("print(1)"))
    text = b"infini-run: --preload: nosuch cannot be imported: ModuleNotFoundError: No module named 'nosuch'\n"
    assert found == (2, b"", text)


def test_preload_of_module_that_reads_rank_is_refused(infini_run, module):
    env = module("import os\nRANK = os.environ.get('LOCAL_RANK')\n")
    status, out, err = run(infini_run, "--preload=preloaded", *code("print(1)"), env=env)
    text = b"--preload=preloaded: preloaded reads LOCAL_RANK during its import; drop preloaded"
    assert (status, out, err) == (2, b"", b"infini-run: " + text + b"\n")


def test_preload_that_exits_is_refused(infini_run, module):
    env = module("raise SystemExit(3)\n")
    status, out, err = run(infini_run, "--preload=preloaded", *code("print(1)"), env=env)
    assert (status, out) == (2, b"")
    assert b"preloaded cannot be imported: SystemExit: 3" in err


def test_preload_that_hangs_ends_at_its_timeout(infini_run, module):
    env = module("import time\ntime.sleep(1000)\n")
    words = ["--preload=preloaded", "--preload_timeout=1s"]
    status, out, err = run(infini_run, *words, *code("print(1)"), env=env)
    assert (status, out) == (1, b"")
    text = b"--preload: the imports took longer than 1.0 s; add --preload_timeout=TIME, or drop a module"
    assert err == b"infini-run: " + text + b"\n"


def test_python_that_ignores_hook_is_refused(infini_run, tmp_path):
    wrapper = tmp_path / "python3"
    wrapper.write_text(f'#!/bin/sh\nunset PYTHONPATH\nexec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    status, _, err = run(infini_run, "--preload=decimal", wrapper, "-c", "pass")
    assert status == 2
    assert b"does not import sitecustomize from PYTHONPATH; drop --preload" in err


@pytest.mark.parametrize(("name", "value"), [("preload", "decimal"), ("preload_timeout", 3)])
def test_process_launcher_refuses_preload(name, value):
    with pytest.raises(ir.UsageError, match=rf"^{name}=: not for a ProcessLauncher; use run$"):
        ir.ProcessLauncher([sys.executable, "-c", "pass"], **{name: value})


# ---- cold


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()",
         b"1 thread of the imports still runs ("),
        ("import os\nkept = os.pipe()", b"the imports left pipe:"),
        ("import subprocess\nchild = subprocess.Popen(['sleep', '1000'])", b"the imports started a process"),
        ("import signal\nsignal.signal(signal.SIGUSR1, lambda *_: None)", b"the imports changed signal handlers"),
        ("import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [10])", b"the imports changed the signal mask"),
        ("import os\nos.chdir('/')", b"the imports changed the working directory"),
        ("import os\nos.umask(0o7)", b"the imports changed the umask"),
        ("import resource\nresource.setrlimit(4, (0, 0))", b"the imports changed a resource limit"),
        ("import sys\nsys.path.insert(0, '/nowhere')", b"the imports put /nowhere first on sys.path"),
        ("import multiprocessing\nlock = multiprocessing.Lock()",
         b"the imports made memory that forks share (/dev/shm/sem"),
        ("import os\nos.kill(os.getpid(), 9)", b"the process of the imports was killed by SIGKILL"),
        ("import os\nos._exit(3)", b"the process of the imports exited"),
    ],
    ids=["thread", "pipe", "child", "handler", "mask", "cwd", "umask", "limit", "path", "lock", "killed", "exit"],
)  # fmt: skip
def test_ranks_start_cold_with_one_line(infini_run, module, source, reason):
    env = module(f"{source}\n")
    text = "import os; print(os.environ['RANK'], 'preloaded' in __import__('sys').modules)"
    command = infini_run("--preload=preloaded", "--nproc_per_node=2", *code(text), env=env)
    assert command.wait() == 0
    assert command.err.startswith(COLD + reason), command.err
    assert command.err.count(b"\n") == 1
    assert sorted(command.out.splitlines()) == [b"0 False", b"1 False"]


def test_ranks_start_cold_without_descriptors_to_spare(infini_run):
    words = ["--preload=decimal", "--nproc_per_node=4", "--console=lines"]
    command = infini_run(
        *words, *code("print('ran')"), preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))
    )
    assert command.wait() == 0, command.err
    assert command.err == COLD + b"the limit on open descriptors is too low (ulimit -n)\n"
    assert command.out == b"ran\n" * 4


def test_accelerator_used_by_imports_is_tried_once(infini_run, module):
    text = "class cuda:\n    _is_in_bad_fork = staticmethod(lambda: True)\nprint('importing')\n"
    words = ["--preload=torch", "--max_restarts=2", "--restart_delay=0"]
    command = infini_run(*words, *code("import sys; sys.exit(3)"), env=module(text, "torch"))
    assert command.wait() == 3
    assert command.err.count(COLD + b"the imports used torch.cuda") == 1
    assert command.out == b"[preload] importing\n"


def test_no_rank_is_forked_while_a_thread_imports(infini_run):
    """It would wait for the lock of that import for ever. The first fork starts the thread."""
    words = ["--preload=importing_at_fork", "--nproc_per_node=3", "--console=lines"]
    env = {**os.environ, "PYTHONPATH": str(CHILDREN)}
    command = infini_run(*words, *code("import endless_import; print('ran')"), env=env)
    assert command.wait() == 0
    assert command.out == b"ran\n" * 3
    assert command.err == COLD + b"1 thread of the imports still runs (Thread-1 (import_module))\n"


@as_root
def test_ranks_are_forked_with_proc_of_another_namespace(infini_run, tmp_path):
    """There the main thread has another number than its process knows."""
    script = tmp_path / "train.py"
    script.write_text("print('trained')")
    report = tmp_path / "report"
    words = ["--preload=json", "--nproc_per_node=2", f"--report={report}", script]
    command = infini_run(*words, under=hidden("another namespace's"))
    assert command.wait() == 0, command.err
    assert command.err == b""
    assert [rank["start_method"] for rank in json.loads(report.read_text())["ranks"]] == ["fork", "fork"]


@pytest.mark.parametrize(
    ("source", "cold"),
    [("sum(range(5_000_000))\n", None), ("import os\nos.umask(0o7)\n", "the imports changed the umask")],
)
def test_report_has_preload_and_how_ranks_started(infini_run, module, tmp_path, source, cold):
    words = ["--preload=preloaded", "--nproc_per_node=2", f"--report={tmp_path}/report"]
    command = infini_run(*words, *code("pass"), env=module(source))
    assert command.wait() == 0
    report = json.loads((tmp_path / "report").read_text())
    assert report["notices"] == ([f"ranks start cold: {cold}"] if cold else [])
    assert [rank["start_method"] for rank in report["ranks"]] == ["exec" if cold else "fork"] * 2
    [use] = report["preload"]
    assert (use["host"], use["cold_because"]) == (report["host"], cold)
    assert use["modules"] == ([] if cold else ["preloaded"])
    assert [use[name] > 0 for name in ("wall_s", "cpu_s", "fork_s")] == [not cold] * 3


@pytest.mark.slow
def test_report_of_last_attempt_says_why_it_started_cold(infini_run, module, tmp_path):
    words = ["--preload=preloaded", "--max_restarts=1", "--restart_delay=0", f"--report={tmp_path}/report"]
    command = infini_run(*words, *code("import sys; sys.exit(3)"), env=module("import os\nos.umask(0o7)\n"))
    assert command.wait() == 3
    report = json.loads((tmp_path / "report").read_text())
    assert report["preload"][0]["cold_because"] == "the imports changed the umask"


def test_imports_print_once_with_their_label(infini_run, module):
    env = module("import sys\nprint('to stdout')\nprint('to stderr', file=sys.stderr)\n")
    command = infini_run("--preload=preloaded", "--nproc_per_node=3", *code("print('ran')"), env=env)
    assert command.wait() == 0
    assert sorted(command.out.splitlines()) == [b"[preload] to stdout", b"ran", b"ran", b"ran"]
    assert command.err == b"[preload] to stderr\n"


def test_imports_print_once_from_c(infini_run, module):
    env = module("import ctypes\nctypes.CDLL(None).printf(b'from C\\n')\n")
    env.pop("PYTHONUNBUFFERED", None)
    command = infini_run("--preload=preloaded", "--nproc_per_node=3", *code("pass"), env=env)
    assert command.wait() == 0
    assert (command.out, command.err) == (b"[preload] from C\n", b"")


def test_long_error_of_import_is_cut(infini_run):
    status, _, err = run(infini_run, f"--preload={'x' * 2000}", *code("pass"))
    assert status == 2
    assert len(err) < 400


def test_file_that_imports_left_open_is_each_ranks_own(infini_run, module, tmp_path):
    (tmp_path / "words").write_text("one\ntwo\nthree\n")
    env = module(f"FILE = open({str(tmp_path / 'words')!r}, 'rb', buffering=0)\nFIRST = FILE.readline()\n")
    text = "import preloaded; print(preloaded.FILE.readline())"
    command = infini_run("--preload=preloaded", "--nproc_per_node=3", *code(text), env=env)
    assert command.wait() == 0
    assert (command.out, command.err) == (b"b'two\\n'\n" * 3, b"")


def test_dry_run_names_preloaded_modules(infini_run):
    status, out, _ = run(infini_run, "--dry_run", "--preload=torch,json", sys.executable, "x.py")
    assert status == 0
    assert b"preload: torch, json, imported once; the ranks are forked from that process" in out
    _, out, _ = run(infini_run, "--dry_run=json", "--preload=torch,json", sys.executable, "x.py")
    assert json.loads(out)["preload"] == ["torch", "json"]


AUTO = '"""A script."""\nimport json\nimport pytest, hypothesis.strategies\nfrom cffi import FFI\nopen("ran", "w")\n'


@pytest.mark.parametrize("how", ["script", "module", "shebang"])
def test_dry_run_names_what_auto_would_preload(infini_run, tmp_path, how):
    """The ranks' own Python reads the script, and runs nothing of it."""
    (tmp_path / "auto.py").write_text(AUTO)
    (tmp_path / "auto").write_text(f"#!{sys.executable} -u\n{AUTO}")
    (tmp_path / "auto").chmod(0o755)
    program = {"script": ["auto.py"], "module": ["-m", "auto"], "shebang": ["./auto"]}[how]
    status, out, err = run(infini_run, "--dry_run", "--preload=auto", *program, cwd=tmp_path)
    assert (status, err) == (0, b"")
    assert b"\npreload: pytest, hypothesis.strategies, cffi, imported once; the ranks are forked from that" in out
    _, out, _ = run(infini_run, "--dry_run=json", "--preload=auto", *program, cwd=tmp_path)
    assert json.loads(out)["preload"] == ["pytest", "hypothesis.strategies", "cffi"]
    assert not (tmp_path / "ran").exists()


def test_dry_run_says_why_auto_preloads_nothing(infini_run, tmp_path):
    (tmp_path / "train.py").write_text("import json\nprint(json)\nimport pytest\n")
    (tmp_path / "python-of-ours").write_text("#!/bin/sh\necho no Python here\n")
    (tmp_path / "python-of-ours").chmod(0o755)
    found = []
    for words in (["train.py"], ["./python-of-ours", "train.py"], ["--hosts=a,b", "train.py"]):
        status, out, _ = run(infini_run, "--dry_run", "--preload=auto", *words, cwd=tmp_path)
        assert status == 0
        found.append(out.decode().splitlines()[-1])
    assert found == [
        "preload: auto: no module of site-packages is imported by the first lines of the script",
        "preload: auto: unknown: ./python-of-ours: no answer to -c: no Python here",
        "preload: auto: each node reads the imports of the script",
    ]


def test_variable_stands_for_flag(infini_run):
    env = {**os.environ, "INFINI_RUN_PRELOAD": "decimal"}
    status, out, _ = run(infini_run, *code("import sys; print('decimal' in sys.modules)"), env=env)
    assert (status, out) == (0, b"True\n")


# ---- restarts


def attempts(out):
    return [line.split() for line in out.decode().splitlines() if line.startswith("attempt")]


SCRIPT = """
import os, sys
count = os.environ["TORCHELASTIC_RESTART_COUNT"]
print("attempt", count, "preloaded" in sys.modules, getattr(sys.modules.get("preloaded"), "PID", 0), flush=True)
open(os.environ["BELL"], "w").write("up\\n")
open(os.environ["GATE"]).read()
sys.exit(0 if count == os.environ.get("LAST", "2") else 3)
"""


@pytest.fixture
def restarting(infini_run, bell, module, tmp_path):
    """A job whose attempts ring, wait for a word, and fail until the last."""

    def start(*flags, last="2", source="import os\nPID = os.getpid()\n"):
        env = module(source) | {"BELL": bell.path, "GATE": str(tmp_path / "go"), "LAST": last}
        os.mkfifo(tmp_path / "go")
        (tmp_path / "job").mkdir()
        script = tmp_path / "job" / "script.py"
        script.write_text(SCRIPT)
        words = ["--preload=preloaded", "--max_restarts=5", "--restart_delay=0", *flags]
        return infini_run(*words, script, env=env)

    def go():
        with open(tmp_path / "go", "w"):
            pass

    start.go = go
    return start


def test_attempt_after_early_failure_starts_cold(restarting, bell):
    command = restarting()
    for _ in range(3):
        bell.hear(1)
        restarting.go()
    assert command.wait() == 0, command.err
    rows = attempts(command.out)
    assert [row[2] for row in rows] == ["True", "False", "True"]
    assert rows[0][3] == rows[2][3], "the imports were made once"
    assert command.err.count(COLD) == 1
    assert b"ranks start cold: the last attempt failed 0." in command.err


def test_slow_stop_after_early_failure_starts_cold(infini_run, tmp_path):
    """Early is within 3 s of the fork here, where it is within 10 s else."""
    os.mkfifo(tmp_path / "ignores")
    text = (
        "import os, signal, sys, time\n"
        "print(os.environ['TORCHELASTIC_RESTART_COUNT'], 'decimal' in sys.modules, flush=True)\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"    open('{tmp_path}/ignores', 'r' if os.environ['RANK'] == '0' else 'w')\n"
        "    sys.exit(3) if os.environ['RANK'] == '0' else time.sleep(1000)\n"
    )
    words = ["--preload=decimal", "--max_restarts=1", "--restart_delay=0", "--grace=3.5s", "--nproc_per_node=2"]
    early = altered({"node.warm_zygote.EARLY_S": 3.0})
    command = infini_run(*words, *code(text), under=early)
    assert command.wait() == 0, command.err
    assert sorted(command.out.split(b"\n")[:-1])[2:] == [b"1 False", b"1 False"]
    assert COLD + b"the last attempt failed 0." in command.err


def zygote_of(command):
    """The processes of the imports, by number: those that carry its mark and are no guard."""
    return [pid for pid in marked() if state_of(pid) and _mark(pid).startswith(b"INFINI_RUN_ID=preload-")]


def _mark(pid):
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            texts = file.read().split(b"\0")
    except OSError:
        return b""
    return next((text for text in texts if text.startswith(b"INFINI_RUN_ID=")), b"")


def test_killed_process_of_imports_is_made_anew(restarting, bell):
    command = restarting()
    bell.hear(1)
    [zygote] = zygote_of(command)
    os.kill(zygote, signal.SIGKILL)
    restarting.go()
    for _ in range(2):
        bell.hear(1)
        restarting.go()
    assert command.wait() == 0, command.err
    rows = attempts(command.out)
    assert [row[2] for row in rows] == ["True", "False", "True"]
    assert rows[0][3] == str(zygote) != rows[2][3]


def test_changed_file_has_imports_made_anew(restarting, bell, tmp_path):
    command = restarting()
    bell.hear(1)
    restarting.go()
    bell.hear(1)
    (tmp_path / "preloaded.py").write_text("import os\nPID = 'changed'\n")
    restarting.go()
    bell.hear(1)
    restarting.go()
    assert command.wait() == 0, command.err
    assert [row[3] for row in attempts(command.out)][1:] == ["0", "changed"]


def test_broken_import_starts_later_attempt_cold(restarting, bell, tmp_path):
    command = restarting()
    bell.hear(1)
    restarting.go()
    bell.hear(1)
    (tmp_path / "preloaded.py").write_text("raise ValueError('broken now')\n")
    restarting.go()
    bell.hear(1)
    restarting.go()
    assert command.wait() == 0, command.err
    assert b"ranks start cold: --preload: preloaded cannot be imported: ValueError: broken now" in command.err


# ---- ended at every step


WAITING = "import time; print('up', flush=True); time.sleep(1000)"


def test_signal_during_imports_ends_launch(infini_run, module, bell):
    env = module("import os\nopen(os.environ['BELL'], 'w').write('up\\n')\nimport time\ntime.sleep(1000)\n")
    command = infini_run("--preload=preloaded", *code("print(1)"), env={**env, "BELL": bell.path})
    bell.hear(1)
    command.signal(signal.SIGTERM)
    assert command.wait() == 143
    assert command.out == b""
    assert command.err == b"infini-run: SIGTERM: stopped during the imports of --preload\n"


GENERATIONS = """
import os, signal
depth = 0
def count():
    global depth
    depth += 1
    {act}
os.register_at_fork(after_in_child=count)
"""


@pytest.mark.parametrize(
    "act",
    [
        "depth == 1 and os.kill(os.getpid(), signal.SIGKILL)",
        "depth == 2 and os.kill(os.getpid(), signal.SIGKILL)",
        "depth == 2 and setattr(os, 'setpgid', None)",
    ],
    ids=["middle killed", "rank killed", "rank raises"],
)
def test_fork_that_fails_is_followed_by_cold_start(infini_run, module, act):
    env = module(GENERATIONS.format(act=act))
    text = "import os, sys; print(os.environ['RANK'], 'preloaded' in sys.modules)"
    command = infini_run("--preload=preloaded", "--nproc_per_node=3", *code(text), env=env)
    assert command.wait() == 0, command.err
    assert COLD + b"the fork failed" in command.err
    assert sorted(command.out.splitlines()) == [b"0 False", b"1 False", b"2 False"]


@pytest.mark.parametrize("restarts", [0, 1])
def test_rank_killed_at_its_gate_is_a_failure(infini_run, module, restarts):
    act = "depth == 2 and setattr(os, 'read', lambda *_: os.kill(os.getpid(), signal.SIGKILL))"
    env = module(GENERATIONS.format(act=act))
    words = ["--preload=preloaded", f"--max_restarts={restarts}", "--restart_delay=0", "--nproc_per_node=2"]
    command = infini_run(*words, *code("print('ran')"), env=env)
    assert command.wait() == (0 if restarts else 137)
    assert command.out == b"ran\n" * 2 * restarts
    assert b"SIGKILL" in command.err


def test_process_of_imports_that_does_not_answer_is_made_anew(restarting, bell):
    command = restarting()
    bell.hear(1)
    [zygote] = zygote_of(command)
    restarting.go()
    bell.hear(1)
    os.kill(zygote, signal.SIGSTOP)
    restarting.go()
    bell.hear(1)
    restarting.go()
    assert command.wait() == 0, command.err
    rows = attempts(command.out)
    assert rows[2][2] == "True"
    assert rows[2][3] != str(zygote)


@pytest.mark.parametrize("flags", [(), ("--max_restarts=1",)], ids=["once", "restarts"])
def test_killed_launcher_leaves_no_process(infini_run, flags):
    command = infini_run("--preload=decimal", "--nproc_per_node=3", *flags, *code(WAITING))
    command.read_lines(b"up", 3)
    command.signal(signal.SIGKILL)
    command.wait()
    until(lambda: not marked())


def test_killed_launcher_leaves_no_process_of_imports(infini_run, module, bell):
    env = module(
        "import os, subprocess, time\nsubprocess.Popen(['setsid', 'sleep', '1000'])\n"
        "open(os.environ['BELL'], 'w').write('up\\n')\ntime.sleep(1000)\n"
    )
    command = infini_run("--preload=preloaded", *code("print(1)"), env={**env, "BELL": bell.path})
    bell.hear(1)
    command.signal(signal.SIGKILL)
    command.wait()
    until(lambda: not marked())


def test_ranks_survive_process_of_imports(infini_run):
    words = ["--preload=decimal", "--nproc_per_node=2", "--max_restarts=1"]
    command = infini_run(*words, *code(WAITING))
    command.read_lines(b"up", 2)
    [zygote] = zygote_of(command)
    os.kill(zygote, signal.SIGKILL)
    until(lambda: not is_alive(zygote))
    assert len([pid for pid, (parent, _, name) in processes().items() if parent == command.pid]) >= 2
    command.signal(signal.SIGTERM)
    assert command.wait() == 143


def test_launch_without_restarts_keeps_no_process_of_imports(infini_run):
    command = infini_run("--preload=decimal", "--nproc_per_node=2", *code(WAITING))
    command.read_lines(b"up", 2)
    until(lambda: not zygote_of(command))
    command.signal(signal.SIGTERM)
    assert command.wait() == 143


def test_leftover_process_of_warm_rank_is_stopped(infini_run, tmp_path):
    text = "import os, subprocess; subprocess.Popen(['setsid', 'sleep', '1000']); print('up', flush=True)"
    command = infini_run("--preload=decimal", "--max_restarts=1", *code(text))
    assert command.wait() == 0
    assert b"stopped 1 process left behind: " in command.err


def test_300_ranks_are_forked(infini_run):
    command = infini_run("--preload=decimal", "--nproc_per_node=300", *code("import os; print(os.environ['RANK'])"))
    assert command.wait() == 0, command.err
    assert sorted(map(int, command.out.split())) == list(range(300))
    assert COLD not in command.err
