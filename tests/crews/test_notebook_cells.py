"""`%load_ext infini_run` in real kernels: cells on every rank, their output, errors, interrupts, and lost ranks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from tests.support.blocks import blocks
from tests.support.paths import ROOT
from tests.support.waiting import LIMIT_S

pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

KERNEL = """
import json, sys
import nbclient, nbformat
from tests.support.kernel_ports import client_config

book = nbformat.v4.new_notebook()
book.cells = [nbformat.v4.new_code_cell(cell) for cell in json.load(sys.stdin)]
given = {"timeout": 120, "kernel_name": "python3", "allow_errors": True, "config": client_config()}
client = nbclient.NotebookClient(book, **given)
client.execute()
with open("shown.json", "w") as file:
    json.dump([cell.outputs for cell in book.cells], file)
with open("widgets.json", "w") as file:
    json.dump(book.metadata.get("widgets", {}), file)
"""
# Interrupts the kernel, as its client does, when a rank has made the file.
BELL = """
import os, signal, threading, time
os.mkfifo("bell")
def on_bell(count=1, ranks=1, done=()):
    def run():
        for _ in range(count):
            heard = ""
            while len(heard) < ranks:
                with open("bell") as bell:
                    heard += bell.read()
            while any(crew.worker(rank).status().tasks for rank in done):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)
    crew = get_ipython().run_line_magic("ranks", "") if done else None
    threading.Thread(target=run, daemon=True).start()
"""
RING = "with open('bell', 'w') as bell:\n    bell.write('x')\n"


@pytest.fixture
def notebook(tmp_path):
    """Return a function that runs cells in a kernel, and returns what each shows."""

    def run(*cells):
        env = os.environ | {"PYTHONPATH": str(ROOT), "JUPYTER_PLATFORM_DIRS": "1"}
        env.pop("PYTEST_CURRENT_TEST", None)  # with it, kernels leave their own stdout alone
        env |= {"HOME": str(tmp_path), "IPYTHONDIR": str(tmp_path)}
        command = [sys.executable, "-W", "ignore", "-c", KERNEL]
        given = json.dumps(["%load_ext infini_run", *cells])
        done = subprocess.run(
            command, input=given, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S * 2
        )
        assert done.returncode == 0, done.stderr
        loaded, *shown = [
            "".join(map(text_of, outputs)) for outputs in json.loads((tmp_path / "shown.json").read_text())
        ]
        assert loaded == ""
        return shown

    return run


def text_of(output):
    data = output.get("data", {}).get("text/plain", "")
    lines = "\n".join(output.get("traceback", [])) or output.get("text", "") or data
    return re.sub("\x1b[^m]*m", "", lines).rstrip("\n") + "\n"


def lines_of(text):
    return sorted(text.splitlines())


def test_cells_run_on_every_rank_and_keep_state(notebook):
    first, second, value, one, status = notebook(
        "%%ranks -n 2\nimport sys\nx = rank\nprint('a', x)\nprint('b', file=sys.stderr)\nx * 2",
        "%%ranks\nx += world_size\nx",
        "x = %rank 1 [x, rank]\nx",
        "%%rank 0\nprint('only', x)",
        "%rank 1",
    )
    expected = ["[rank 0 err] b", "[rank 0] 0", "[rank 0] a 0", "[rank 1 err] b", "[rank 1] 2", "[rank 1] a 1"]
    assert lines_of(first) == expected
    assert lines_of(second) == ["[rank 0] 2", "[rank 1] 3"]
    assert value == "[3, 1]\n"
    assert one == "[rank 0] only 2\n"
    assert re.match(r"WorkerStatus\(rank=1, state='ready'", status)


def test_push_gives_all_ranks_variables_of_notebook(notebook):
    shown = notebook(
        "lr, sizes = 0.1, [3, 5]\ndef scaled(value):\n    return value * lr\nlock = __import__('threading').Lock()",
        "%%ranks -n 2 --push lr,sizes,scaled\nsizes.append(rank)\n(sizes, round(scaled(10), 6))",
        "%%ranks\nsizes",
        "%%ranks --push sizes\nsizes",
        "%%ranks --push rate\npass",
        "%%ranks --push lock\npass",
    )
    assert [sorted(text.splitlines()) for text in shown[1:4]] == [
        ["[rank 0] ([3, 5, 0], 1.0)", "[rank 1] ([3, 5, 1], 1.0)"],
        ["[rank 0] [3, 5, 0]", "[rank 1] [3, 5, 1]"],
        ["[rank 0] [3, 5]", "[rank 1] [3, 5]"],
    ]
    assert shown[4] == "UsageError: %%ranks --push: unknown variable 'rate'; use names of the notebook's variables\n"
    assert shown[5].startswith("UnpicklableError: ")
    assert "'lock'" in shown[5]
    assert "_thread.lock" in shown[5]


def test_first_error_shows_only_lines_of_cell(notebook):
    failed, syntax, mixed, leaving, after, value = notebook(
        "%%ranks -n 3\nkept = 5\ndef inner(x):\n    return 1 / x  # the place\ninner(0)",
        "%%ranks\nx = = 1",
        "%%ranks\nif rank: raise KeyError('k')\nraise ValueError('v')",
        "%%ranks\nraise SystemExit(3)",
        "%%ranks\nkept",
        "%rank 2 (x for x in ())",
    )
    assert failed.count("Traceback") == failed.count("ZeroDivisionError") == 1
    assert re.search(r'"In\[2\]", line 5, in <module>\n +inner\(0\)\n', failed)
    assert re.search(r'"In\[2\]", line 4, in inner\n +return 1 / x  # the place\n', failed)
    assert re.search(r"^on rank \d\nthe same on ranks \d, \d$", failed, re.MULTILINE)
    assert syntax.startswith('  File "In[3]", line 2\n')
    assert "SyntaxError: invalid syntax\non rank" in syntax
    assert {"KeyError: 'k'", "ValueError: v"} <= set(re.findall(r"\w+Error: \S+", mixed))
    assert mixed.count("Traceback") == 1
    assert "SystemExit: 3\n" in leaving
    assert lines_of(after) == ["[rank 0] 5", "[rank 1] 5", "[rank 2] 5"]
    assert value.startswith("UnpicklableError: result.value of rank 2 cannot be sent")
    assert "infini_run/" not in failed + syntax + mixed + leaving + value


def test_value_that_does_not_unpickle_here_is_one_error(notebook):
    *_, unread = notebook("%%ranks -n 1\nclass Own: pass\nown = Own()", "%rank 0 own")
    assert unread.startswith("the result of rank 0 on ")
    assert "cannot be unpickled here: AttributeError" in unread
    assert "Traceback" not in unread


def test_interrupt_stops_cell_and_keeps_state(notebook):
    *_, stopped, after = notebook(
        BELL + "on_bell(ranks=2)",
        "%%ranks -n 2\nimport threading\nx = rank",
        f"%%ranks\n{RING}threading.Event().wait()",
        "%%ranks\nx",
    )
    assert 'File "In[4]", line' in stopped
    assert re.search(r"^KeyboardInterrupt\non rank (\d)\nthe same on rank (?!\1)\d$", stopped, re.MULTILINE)
    assert "infini_run/" not in stopped
    assert "lost" not in stopped
    assert lines_of(after) == ["[rank 0] 0", "[rank 1] 1"]


HOLDS = """\
while True:
    try:
        {ring}
        threading.Event().wait()
    except KeyboardInterrupt:
        {ring}
"""


INTERRUPT_AT = """
import signal, sys, threading
def trace(frame, event, arg):
    if frame.f_code is not threading.Thread.start.__code__ or frame.f_locals["self"].name != "infini-run-cell":
        return None
    if event == {event!r}:
        sys.settrace(None)
        signal.raise_signal(signal.SIGINT)
    return trace
sys.settrace(trace)
"""


@pytest.mark.parametrize("event", ["call", "return"])
def test_interrupt_while_cell_starts_stops_cell(notebook, event):
    *_, stopped, after = notebook(
        "%%ranks -n 2\nx = rank",
        INTERRUPT_AT.format(event=event),
        "%%ranks\nimport time\nwhile True: time.sleep(0.01)",
        "%%ranks\nx",
    )
    assert re.match(r"(Traceback|KeyboardInterrupt: before the cell began\n)", stopped)
    assert re.search(r"^KeyboardInterrupt", stopped, re.MULTILINE)
    assert "infini_run" not in stopped
    assert lines_of(after) == ["[rank 0] 0", "[rank 1] 1"]


def test_interrupt_while_crew_starts_is_one_line(notebook):
    _, stopped, after = notebook(
        INTERRUPT_AT.format(event="call").replace('!= "infini-run-cell"', '== ""'),
        "%%ranks -n 2\nrank",
        "%%ranks -n 1\nrank",
    )
    assert (stopped, after) == ("KeyboardInterrupt\n", "[rank 0] 0\n")


@pytest.mark.parametrize(("options", "bells"), [("--grace 0.2", 1), ("--grace 600", 2)])
def test_rank_that_ignores_interrupt_is_replaced(notebook, options, bells):
    ring = RING.replace("\n", "\n        ").rstrip()
    holds = "".join(f"    {line}\n" for line in HOLDS.format(ring=ring).splitlines())
    *_, stopped, after = notebook(
        BELL + f"on_bell({bells})",
        "%%ranks -n 2\nimport threading\nx = rank",
        f"%%ranks {options}\nif rank:\n{holds}",
        "%%ranks\nprint('x' in globals(), rank)",
    )
    why = "was interrupted again" if bells == 2 else "did not return within 0.2 s"
    assert f"infini-run: rank 1 {why}: a new worker replaces it, and its state is lost\n" in stopped
    assert re.search(r"rank 1 on .* died: killed by SIGKILL", stopped)
    assert stopped.count("lost") == 1
    assert lines_of(after) == ["[rank 0] True 0", "[rank 1] False 1"]


def test_rank_that_dies_is_replaced_and_reported(notebook):
    died, after, between = notebook(
        "%%ranks -n 2\nimport os\nif rank: os._exit(3)",
        "%%ranks\nrank",
        "%%ranks\nimport os, threading\nprint(rank)",
    )
    assert died.count("infini-run: rank 1 died: a new worker replaces it, and its state is lost\n") == 1
    assert re.search(r"^WorkerDied: rank 1 on .* died: exit code 3", died, re.MULTILINE)
    assert lines_of(after) == lines_of(between) == ["[rank 0] 0", "[rank 1] 1"]


def test_failure_while_others_wait_has_a_hint(notebook):
    _, stopped = notebook(
        BELL + "on_bell()",
        "%%ranks -n 2\nimport os, threading\nif rank: raise KeyError(rank)\nimport time\ntime.sleep(4)\n"
        + RING
        + "threading.Event().wait()",
    )
    assert "infini-run: rank 1 failed; to stop the others (0), interrupt the cell\n" in stopped
    assert "KeyError: 1\n" in stopped
    assert "on rank 0: KeyboardInterrupt" in stopped


def test_output_of_programs_and_forks_comes_too(notebook):
    code = """%%ranks -n 1
import os, subprocess, sys
print("half", end="")
sys.stdout.flush()
print()
pid = os.fork()
if not pid:
    print("of a fork")
    sys.stdout.flush()
    os._exit(0)
os.waitpid(pid, 0)
print(subprocess.run(["echo", "piped"], stdout=subprocess.PIPE, text=True).stdout, end="")
subprocess.run(["echo", "direct"], stdout=sys.stdout, check=True)
print("10%\\r50%\\r100%")"""
    shown = notebook(code, "%ranks --close")  # the end of the ranks comes after all that they wrote
    lines = set("".join(shown).splitlines())
    assert {f"[rank 0] {text}" for text in ("half", "of a fork", "piped", "direct", "100%")} <= lines


def test_objects_are_tables_in_notebook(notebook, tmp_path):
    notebook(
        "import infini_run as ir\nlauncher = ir.Launcher(nproc_per_node=2)",
        "result = launcher.run(lambda: ['<b>', 'x' * 600])\nresult",
        "handle = launcher.start(lambda: 1)\nhandle.result()\nhandle",
        "%%ranks -n 2\nimport infini_run as ir\nir.this_worker().progress(3, 4)",
        "%ranks",
        "crew = ir.Crew(abs, nproc_per_node=2)\nasks = crew.broadcast(-3)\nasks.result()\nasks",
        "asks[1]",
        "crew.worker(1)",
        "crew[:]",
        "ask = crew.ask('<x>')\nask.exception()\ncrew.close()\nask",
    )
    outputs = json.loads((tmp_path / "shown.json").read_text())
    result, handle, _, crew, asks, ask, worker, workers, failed = [
        [cell["data"]["text/html"] for cell in cells if "data" in cell] for cells in outputs[2:]
    ]
    assert "LaunchResult of 2 ranks" in result[0]
    assert "&lt;b&gt;" in result[0]
    assert "<b>" not in result[0]
    assert len(result[0]) < 2000
    left = ' style="text-align:left"'
    assert handle[0].count(f"<td{left}>exit code 0</td>") == 2
    row = rf"<tr><td>(\d)</td><td{left}>[^<]+</td><td>\d+</td><td{left}>ready</td>"
    assert re.findall(row, crew[0]) == ["0", "1"]
    assert crew[0].count(f"<td{left}>3 of 4</td>") == 2
    assert re.findall(row, workers[0]) == ["0", "1"]
    assert re.findall(row, worker[0]) == ["1"]
    assert worker[0].startswith("<p>WorkerHandle of rank 1: ready</p>")
    assert asks[0].count(f"<td{left}>done</td>") == 2
    assert asks[0].count(f"<td{left}>3</td>") == 2
    assert re.findall(rf"<tr><td>(\d)</td><td{left}>done</td><td>(\d)</td>", ask[0]) == [("1", "1")]
    assert f"<td{left}>TypeError: bad operand type for abs(): &#x27;str&#x27;</td>" in failed[0]
    assert crew[0].startswith('<p>Crew of 2: running</p><div style="overflow-x:auto"><table><tr><th>rank</th>')


BARS = (
    "%%ranks -n 2 --progress\nimport infini_run as ir\nfor step in range(4): ir.this_worker().progress(step + 1, 4)",
    "import infini_run as ir\nwith ir.Crew(abs, nproc_per_node=2) as crew: list(crew.map([-1, 2], progress=True))",
    "def fit(): ir.this_worker().progress(1, 1)\nresult = ir.Launcher(nproc_per_node=2, progress=True).run(fit)",
)


def test_bars_are_widgets(notebook, tmp_path):
    for module in ("tqdm", "ipywidgets"):
        pytest.importorskip(module)
    shown = notebook(*BARS)
    assert [text.split()[0] for text in shown] == ["ranks", "map", "fit"]
    (widgets,) = json.loads((tmp_path / "widgets.json").read_text()).values()
    states = [model["state"] for model in widgets["state"].values()]
    assert [state["value"] for state in states if state["_model_name"] == "FloatProgressModel"] == [100.0] * 3


def test_bars_are_text_without_ipywidgets(notebook):
    pytest.importorskip("tqdm")
    _, *shown = notebook("import sys\nsys.modules['ipywidgets'] = None", *BARS)
    for text, name in zip(shown, ("ranks", "map", "fit"), strict=True):
        assert re.fullmatch(rf"{name} +█+ 100%\s*", text.rpartition("\r")[2])
        assert "Warning" not in text


def test_error_of_function_is_shown_once_with_name_of_cell(notebook):
    code = (
        "import infini_run as ir\ndef fail():\n    raise ValueError('nan')\nir.Launcher(nproc_per_node=1).run(fail)"
    )
    (shown,) = notebook(code)
    assert shown.count("ValueError: nan") == 2  # with the caller's frame, and with the rank's
    assert "RemoteError" not in shown
    assert "  Cell In[2], line 3, in fail\n" in shown
    assert "infini_run/" not in shown


def test_invalid_requests_are_one_line(notebook):
    shown = notebook(
        "%%ranks\n1",
        "%rank 0 1",
        "%%ranks -n x\n1",
        "%%ranks -n 2 --gpus 3\n1",
        '%%ranks "-n\n1',
        "%%ranks -n 2\n1",
        "%%ranks -n 2\n1",
        "%%ranks -n 3\n1",
        "%rank 2 1",
        "%%rank x\n1",
        "%ranks --close",
        "%ranks",
        "%unload_ext infini_run",
        "%load_ext infini_run",
        "%%ranks -n 1\nrank",
    )
    assert shown == [
        "UsageError: no ranks are running; use %%ranks -n N first\n",
        "UsageError: no ranks are running; use %%ranks -n N first\n",
        "UsageError: nproc_per_node='x': expected 1 to 4194304, auto, gpu, or cpu\n",
        "UsageError: %%ranks: unrecognized arguments: --gpus 3; see %ranks?\n",
        "UsageError: %%ranks: '\"-n': No closing quotation; see %ranks?\n",
        shown[5],
        shown[6],
        "UsageError: %%ranks: -n 3: already started with -n 2; drop it, or run %ranks --close first\n",
        "UsageError: %rank 2: unknown rank; use 0 to 1\n",
        "UsageError: %%rank x: unknown rank; use 0 to 1\n",
        "",
        "UsageError: no ranks are running; use %%ranks -n N first\n",
        "",
        "",
        "[rank 0] 0\n",
    ]
    assert lines_of(shown[5]) == lines_of(shown[6]) == ["[rank 0] 1", "[rank 1] 1"]


def test_package_loads_ipython_only_for_its_magics():
    code = "import sys, infini_run; infini_run.load_ipython_extension; print('IPython' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


NUMBER = re.compile(r"\b(vm|pid \d+|on [\w.-]+ died)\b")
CARETS = re.compile(r"^ *~*\^+~*\n", re.MULTILINE)  # of some versions of Python


def test_guide_shows_what_kernel_prints(notebook):
    page = [block for block in blocks(ROOT / "docs/notebook-cells.md") if block.language in ("python", "text")]
    cells = [block.text for block in page if block.language == "python"]
    assert cells[0] == "%load_ext infini_run\n"
    *before, slow = (cell.rstrip("\n") for cell in cells[1:])
    slow = slow.replace("    try:", "    try:\n        " + RING.replace("\n", "\n        ").rstrip())
    *shown, _, interrupted = notebook(*before, BELL + "on_bell(done=[0])", slow)
    shown.append(interrupted)
    shown = [text for text in shown if text]
    printed = [block.text for block in page if block.language == "text"]
    assert len(printed) == len(shown)
    for text, expected in zip(shown, printed, strict=True):
        assert alike(text) == alike(expected)


def alike(text):
    """Return the lines without what differs: ranks print, and fail, in any order."""
    text = re.sub(r"^(on|the same on) rank \d$", r"\1", NUMBER.sub("", CARETS.sub("", text)), flags=re.MULTILINE)
    return sorted(text.splitlines())
