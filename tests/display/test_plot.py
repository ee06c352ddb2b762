"""--plot: the picture shows what the report says. Real pictures, read back pixel by pixel."""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import stat
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infini_run.display.plot import COLOURS, draw, plot
from infini_run.display.timeline import Bar, Timeline, read_timeline
from infini_run.errors import UsageError
from tests.support.command import play
from tests.support.waiting import until

pytest.importorskip("matplotlib")
import matplotlib.colors
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.image import imread

pytestmark = pytest.mark.xdist_group("plots")  # fonts are read in one worker


@pytest.fixture(scope="module", autouse=True)
def fonts():
    """matplotlib keeps its fonts open from the first picture of a form on."""
    figure = draw(Timeline(title="t", bars=(Bar(rank=0, start_s=0.0, end_s=1.0, kind="done"),)))
    FigureCanvasAgg(figure).draw()
    for form in ("pdf", "svg"):
        figure.savefig(io.BytesIO(), format=form)


def rank(number, start=100.0, end=110.0, **fields):
    base = {"rank": number, "start": start, "end": end, "ready": None, "failed": False, "stopped": False}
    return base | {"exit_code": 0, "signal": None, "watchdog_reason": None} | fields


def report(*ranks, **fields):
    base = {"format": 2, "run_id": "", "launch_id": "ir-1", "host": "node1", "world_size": len(ranks), "exit_code": 0}
    return base | {"end": 111.0, "first_failure": None, "ranks": list(ranks)} | fields


@pytest.fixture
def write(tmp_path):
    def write(content, name="report.json"):
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
        return str(tmp_path / name)

    return write


def artist(figure, gid):
    (found,) = [a for a in figure.axes[0].get_children() if a.get_gid() == gid]
    return found


def boxes(figure, kind):
    """(left, right, row) of every bar of a kind, in seconds and rows of the picture."""
    found = []
    for path in artist(figure, kind).get_paths():
        (left, low), (right, high) = path.vertices.min(axis=0), path.vertices.max(axis=0)
        found.append((left, right, round((low + high) / 2)))
    return found


def pixels(figure):
    """The picture as numbers, and a function from seconds and a row to a place in it."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    image = np.asarray(canvas.buffer_rgba())[..., :3]

    def at(time_s, row):
        x, y = figure.axes[0].transData.transform((time_s, row))
        return tuple(image[image.shape[0] - 1 - round(y), round(x)])

    return image, at


def rgb(kind):
    return tuple(round(255 * part) for part in matplotlib.colors.to_rgb(COLOURS[kind]))


FAILED = report(
    rank(0, 100.0, 112.0, exit_code=None, signal="SIGTERM", stopped=True),
    rank(1, 100.5, 110.0, exit_code=3, failed=True, ready=104.0),
    rank(2, 101.0, 111.0, exit_code=None, signal="SIGSEGV", failed=True),
    rank(3, 101.0, 106.0),
    first_failure=1,
    exit_code=3,
)


def test_every_rank_is_a_bar_where_it_ran_and_in_the_colour_of_its_end(write):
    figure = draw(read_timeline([write(FAILED)]))
    assert boxes(figure, "stopped") == [(0.0, 12.0, 0)]
    assert boxes(figure, "failed") == [(0.5, 10.0, 1), (1.0, 11.0, 2)]
    assert boxes(figure, "done") == [(1.0, 6.0, 3)]
    _image, at = pixels(figure)
    assert [at(2.0, row) for row in range(4)] == [rgb(k) for k in ("stopped", "failed", "failed", "done")]
    assert at(7.0, 3) == (255, 255, 255)  # it had ended
    assert at(0.2, 2) == (255, 255, 255)  # it had not begun
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert figure.axes[0].yaxis_inverted() or figure.axes[0].get_ylim()[0] > figure.axes[0].get_ylim()[1]


def test_failures_are_marked_and_the_first_is_said_to_be_the_first(write):
    figure = draw(read_timeline([write(FAILED)]))
    marks = artist(figure, "failures")
    assert sorted(zip(marks.get_xdata(), marks.get_ydata(), strict=True)) == [(10.0, 1), (11.0, 2)]
    words = [text.get_text() for text in figure.axes[0].texts]
    assert words == ["rank 1, first: exit 3", "rank 2: SIGSEGV"]
    ready = artist(figure, "ready")
    assert (list(ready.get_xdata()), list(ready.get_ydata())) == ([4.0], [1])
    assert figure.axes[0].get_title(loc="left") == "ir-1 on node1: 4 ranks, exit code 3"
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts == ["1 done", "2 failed", "1 stopped by infini-run", "1 ready"]


def test_the_command_draws_what_a_launch_reported(infini_run, tmp_path):
    picture, told = tmp_path / "out.png", tmp_path / "report.json"
    words = play("@2", "exit=7", "@*", "wait")
    assert infini_run(f"--report={told}", "--nproc_per_node=4", *words).wait() == 7
    command = infini_run(f"--plot={picture}", told, env={**os.environ, "DISPLAY": "", "MPLCONFIGDIR": str(tmp_path)})
    assert (command.wait(), command.out) == (0, b"")
    assert command.err in (
        b"",
        b"Matplotlib is building the font cache; this may take a moment.\n",
    )  # after 5 s of it
    image = np.round(imread(picture)[..., :3] * 255).astype(int)
    assert image.shape[0] > 200
    assert image.shape[1] > 1000
    above = image[: int(0.68 * len(image))]  # of the legend; a label may be drawn over a part of a bar's height
    red, grey = ((above == rgb(kind)).all(axis=2).any(axis=0).sum() for kind in ("failed", "stopped"))
    bars = {bar.rank: bar for bar in read_timeline([str(told)]).bars}
    stopped_s = max(bars[k].end_s for k in (0, 1, 3)) - min(bars[k].start_s for k in (0, 1, 3))
    assert red / grey == pytest.approx((bars[2].end_s - bars[2].start_s) / stopped_s, abs=0.03)
    assert stat.S_IMODE(picture.stat().st_mode) == 0o600


def test_a_failure_before_a_restart_is_marked_though_the_job_went_well_then(infini_run, tmp_path):
    once = ["sh", "-c", "[ $RANK$TORCHELASTIC_RESTART_COUNT = 10 ] && exit 5; sleep 0.1"]
    told = tmp_path / "report.json"
    command = infini_run(f"--report={told}", "--nproc_per_node=2", "--max_restarts=1", "--restart_delay=100ms", *once)
    assert command.wait() == 0
    timeline = read_timeline([str(told)])
    assert [(bar.rank, bar.kind, bar.is_first) for bar in timeline.bars] == [
        (0, "done", False), (1, "failed", True), (1, "done", False)
    ]  # fmt: skip
    assert timeline.bars[1].end_s < timeline.bars[2].start_s
    assert timeline.title.endswith(": 2 ranks, exit code 0 after 1 restart")
    figure = draw(timeline)
    assert list(artist(figure, "failures").get_ydata()) == [1]
    assert figure.axes[0].texts[0].get_text() == "attempt 1"
    first, line = figure.axes[0].get_xlabel().split("\n")
    assert first == "seconds since the first start"
    assert re.fullmatch(r"attempt 1 failed after \d\.\d s: rank 1: exit 5, restarted", line)


RESTARTED = report(
    *(rank(n, 132.0, 160.0) for n in range(4)),
    earlier_failures=[
        rank(3, 100.0, 112.0, exit_code=3, failed=True),
        rank(1, 113.0, 131.0, exit_code=None, signal="SIGSEGV", failed=True),
    ],
    restarts=2,
)


def test_earlier_attempts_are_marked_and_their_ranks_ran(write):
    figure = draw(read_timeline([write(RESTARTED)]))
    bands = [artist(figure, f"attempt {number}").get_extents() for number in (1, 2)]
    left = figure.axes[0].transData.inverted().transform([[band.x0, 0] for band in bands])[:, 0]
    assert [round(second) for second in left] == [0, 13]
    _image, at = pixels(figure)
    assert at(6.0, 0) == at(20.0, 2) == (0xE4, 0xE7, 0xEB)  # ran, though the report has only the first failure
    assert at(12.5, 0) == (255, 255, 255)  # between two attempts
    names = [(text.get_text(), round(text.xy[0])) for text in figure.axes[0].texts]
    assert names == [("attempt 1", 0), ("attempt 2", 13), ("attempt 3", 32)]


def test_restart_labels_leave_the_next_bar_free(write):
    figure = draw(read_timeline([write(RESTARTED)]))
    _image, at = pixels(figure)
    assert {at(33.0 + second, row) for second in range(26) for row in range(4)} == {rgb("done")}
    assert figure.axes[0].get_xlabel().splitlines()[1:] == [
        "attempt 1 failed after 12.0 s: rank 3: exit 3, restarted",
        "attempt 2 failed after 18.0 s: rank 1: SIGSEGV, restarted",
    ]


def test_attempts_of_several_nodes_are_merged(write):
    parts = [write(RESTARTED | {"host": host}, f"{host}.json") for host in ("a", "b")]
    assert read_timeline(parts).attempts == ((100.0, 112.0), (113.0, 131.0), (132.0, 160.0))
    assert read_timeline([parts[0], write(FAILED)]).attempts == ()


def test_reports_of_several_nodes_are_one_picture(write):
    parts = [
        write(report(rank(2 * n, 100 + n), rank(2 * n + 1, 100 + n), world_size=4), f"{n}.json") for n in range(2)
    ]
    assert boxes(draw(read_timeline(parts)), "done") == [(0, 10, 0), (0, 10, 1), (1, 10, 2), (1, 10, 3)]


def test_a_thousand_ranks_fit_and_their_failures_can_be_read(write):
    ranks = [rank(n, 100 + n / 1000, 160, stopped=True) for n in range(1000)]
    for n in (371, 372, 900):
        ranks[n] = rank(n, 100, 150, failed=True, exit_code=3)
    figure = draw(read_timeline([write(report(*ranks, first_failure=371))]))
    assert len(figure.axes[0].collections) == 2  # not one artist for each rank
    assert max(figure.get_size_inches()) <= 12
    image, at = pixels(figure)
    assert image.shape[0] < 2000
    assert at(30.0, 100) == rgb("stopped")
    assert at(59.0, 372) == (255, 255, 255) or at(59.0, 371) == (255, 255, 255)
    assert [t.get_text() for t in figure.axes[0].texts] == ["rank 371, first: exit 3", "rank 900: exit 3"]
    spots = [label.get_window_extent() for label in figure.axes[0].get_yticklabels()]
    assert all(not a.overlaps(b) for a, b in itertools.pairwise(spots))
    words = [text.get_window_extent() for text in figure.axes[0].texts]
    assert not words[0].overlaps(words[1])
    assert len(artist(figure, "failures").get_xdata()) == 3


@pytest.mark.parametrize("form", ["png", "svg", "pdf"])
def test_other_forms_are_had_by_their_name(write, tmp_path, form):
    target = tmp_path / f"picture.{form}"
    plot(str(target), [write(FAILED)])
    assert target.read_bytes()[:4] in (b"\x89PNG", b"<?xm", b"%PDF")
    assert os.listdir(tmp_path).count(target.name) == 1
    assert len(os.listdir(tmp_path)) == 2


def test_letters_that_no_font_has_are_no_noise(infini_run, write, tmp_path):
    command = infini_run("--plot=o.png", write(report(rank(0), run_id="\u8bad\u7ec3")), cwd=tmp_path)
    assert (command.wait(), command.err) == (0, b"")


def test_words_that_mean_something_to_matplotlib_are_just_words(write):
    figure = draw(
        read_timeline([write(report(rank(0, failed=True, exit_code="$x_$"), host=r"a$\bad{$", run_id="_"))])
    )
    FigureCanvasAgg(figure).print_figure(io.BytesIO(), format="png")
    assert r"a$\bad{$" in figure.axes[0].get_title(loc="left").replace(r"\$", "$").replace("\\\\", "\\")


# ---- a folder of logs


def test_a_folder_that_holds_the_report_is_drawn_by_it(infini_run, tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    command = infini_run(f"--log_dir={logs}", f"--report={logs}/r.json", "--nproc_per_node=2", *play("exit=0"))
    assert command.wait() == 0
    (logs / "config.json").write_text("{}")
    assert [bar.kind for bar in read_timeline([str(logs)]).bars] == ["done", "done"]


def test_without_a_report_logs_say_when_they_were_made_and_last_written(infini_run, tmp_path):
    logs = tmp_path / "logs"
    script = 'echo 1; [ $RANK = 1 ] && echo \'{"message": "boom"}\' > $TORCHELASTIC_ERROR_FILE; sleep 0.2; echo 2'
    command = infini_run(f"--log_dir={logs}", "--nproc_per_node=2", "sh", "-c", script)
    assert command.wait() == 0
    timeline = read_timeline([str(logs)])
    assert timeline.title == "logs: 2 logs, from their creation to their last line"
    assert [(bar.rank, bar.kind, bar.end) for bar in timeline.bars] == [(0, "unknown", ""), (1, "failed", "boom")]
    for bar in timeline.bars:
        assert 0.1 < bar.end_s - bar.start_s < 50
    plot(str(tmp_path / "o.png"), [str(logs)])
    assert imread(tmp_path / "o.png").shape[2] == 4


TWICE = """
echo "attempt $TORCHELASTIC_RESTART_COUNT"
if [ $RANK$TORCHELASTIC_RESTART_COUNT = 10 ]; then echo '{"message": "boom"}' > $TORCHELASTIC_ERROR_FILE; exit 3; fi
sleep 0.2; echo done >&2
"""


def test_logs_in_the_layout_of_torchrun_are_drawn_attempt_by_attempt(infini_run, tmp_path):
    flags = ("--log_layout=torchrun", "--nproc_per_node=2", "--max_restarts=1", "--restart_delay=100ms")
    command = infini_run("--log_dir=lg", "--rdzv_id=job", *flags, "sh", "-c", TWICE, cwd=tmp_path)
    assert command.wait() == 0
    (run,) = (tmp_path / "lg").iterdir()
    for folder in (tmp_path / "lg", run):
        timeline = read_timeline([str(folder)])
        assert timeline.title == f"{run.name}: 4 pairs of logs of local ranks, from their creation to their last line"
        assert [(bar.rank, bar.kind, bar.end, bar.is_first) for bar in timeline.bars] == [
            (0, "unknown", "", False), (0, "unknown", "", False),
            (1, "failed", "boom, restarted", True), (1, "unknown", "", False),
        ]  # fmt: skip
        for before, after in (timeline.bars[:2], timeline.bars[2:]):
            assert before.start_s <= before.end_s < after.start_s
            assert 0.1 < after.end_s - after.start_s < 50
    command = infini_run("--plot=x.png", "lg", cwd=tmp_path)
    assert (command.wait(), command.err) == (0, b"")
    assert (tmp_path / "x.png").exists()


def test_of_several_runs_in_the_layout_of_torchrun_the_newest_is_drawn(infini_run, tmp_path):
    for count in (3, 2):
        flags = ("--log_layout=torchrun", f"--nproc_per_node={count}")
        assert infini_run(f"--log_dir={tmp_path}", *flags, "sh", "-c", "echo; sleep 0.1; echo").wait() == 0
    assert [bar.rank for bar in read_timeline([str(tmp_path)]).bars] == [0, 1]


def test_a_hang_is_that_of_the_attempt_in_which_it_was_found(tmp_path):
    for attempt in range(3):
        inner = tmp_path / f"lg/none_1/attempt_{attempt}/0"
        inner.mkdir(parents=True)
        (inner / "stdout.log").write_text("said\n")
        last = inner / "stdout.log"
        if attempt == 1:
            last = write_later(tmp_path / "lg/hang_0.txt", last)
        write_later(inner / "error.log", last)
    kinds = [(bar.kind, bar.end) for bar in read_timeline([str(tmp_path / "lg")]).bars]
    assert kinds == [("unknown", ""), ("failed", "hung, restarted"), ("unknown", "")]


def write_later(path, than):
    """When the file system's clock has gone on."""
    until(lambda: path.write_text("x") and path.stat().st_mtime > than.stat().st_mtime)
    return path


def test_of_many_files_only_the_newest_report_is_read(write, tmp_path):
    for number in range(3):
        os.utime(write(report(rank(number)), f"{number}.json"), (number, number))
    os.utime(write("{}", "config.json"), (9, 9))
    code = (
        "import sys; from infini_run.display.timeline import read_timeline\n"
        "def told(event, args): event == 'open' and str(args[0]).endswith('.json') and print(args[0])\n"
        "sys.addaudithook(told)\n"
        "print([bar.rank for bar in read_timeline(['.']).bars])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["./config.json", "./2.json", "[2]"]


# ---- what cannot be drawn


def test_a_folder_with_a_link_that_leads_nowhere_is_one_line(infini_run, tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "rank_0.log").symlink_to("rank_0.log")
    command = infini_run("--plot=o.png", "logs", cwd=tmp_path)
    assert command.wait() == 2
    reason = b"infini-run: --plot: logs/rank_0.log cannot be read: Too many levels of symbolic links; use the FILE"
    assert command.err.startswith(reason)
    assert command.err.count(b"\n") == 1


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "not a report of infini-run"),
        ("{", "not a report of infini-run"),
        ("[" * 100000, "not a report of infini-run"),
        ("[]", "not a report of infini-run"),
        ({"ranks": 3}, "not a report of infini-run"),
        (report(rank(0)) | {"format": 1}, "is of format 1"),
        (report({"rank": 0, "start": 1.0}), "is an incomplete report"),
        (report(rank(0), exit_code=None), "is an incomplete report"),
        (report(rank(0, start=None)), "has no rank that was started"),
        (report(), "has no rank that was started"),
        (report(rank(0), earlier_failures=[{"rank": 0, "start": 1.0}]), "is an incomplete report"),
        (report(rank(0), earlier_failures=7), "is an incomplete report"),
        (report(rank(0, start=float("nan"))), "is an incomplete report"),
        (report(rank(0, start=10**400)), "is an incomplete report"),
        (report(rank(float("inf"))), "is an incomplete report"),
    ],
)
def test_what_is_no_report_is_refused(write, content, reason):
    with pytest.raises(UsageError, match=reason):
        read_timeline([write(content)])


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], b"--plot: needs a finished launch; use the FILE of --report=FILE or the DIR of --log_dir=DIR"),
        (["python", "train.py"], b"python cannot be read: No such file or directory; use the FILE"),
        (["empty"], b"empty holds no log of a rank and no report"),
    ],
)
def test_the_command_says_what_to_give(infini_run, tmp_path, words, reason):
    (tmp_path / "empty").mkdir()
    command = infini_run("--plot=o.png", *words, cwd=tmp_path)
    assert command.wait() == 2
    assert reason in command.err
    assert command.err.count(b"\n") == 1
    assert os.listdir(tmp_path) == ["empty"]


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("o.xyz", b"a name that ends in ."),
        ("o", b"a name that ends in ."),
        ("missing/o.png", b"cannot be written: No such file or directory"),
        ("folder.png", b"is not a regular file"),
    ],
)
def test_a_target_that_cannot_be_is_refused(infini_run, write, tmp_path, target, reason):
    (tmp_path / "folder.png").mkdir()
    command = infini_run(f"--plot={target}", write(FAILED), cwd=tmp_path)
    assert command.wait() == 2
    assert reason in command.err
    assert command.err.count(b"\n") == 1
    assert sorted(os.listdir(tmp_path)) == ["folder.png", "report.json"]


def test_the_extra_that_is_missing_is_named(infini_run, write, tmp_path):
    (tmp_path / "matplotlib").mkdir()
    (tmp_path / "matplotlib/__init__.py").write_text("raise ImportError('none')\n")
    command = infini_run("--plot=o.png", write(FAILED), cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert command.wait() == 2
    assert command.err == (b"infini-run: --plot: needs matplotlib; run pip install 'infini-run[plot]'\n")


def test_no_variable_turns_a_launch_into_a_picture(infini_run, tmp_path):
    environ = {**os.environ, "INFINI_RUN_PLOT": "o.png", "PET_COMPLETION": "bash"}
    command = infini_run(*play("say=ran", "exit=0"), cwd=tmp_path, env=environ)
    assert command.wait() == 0
    assert b"ran" in command.out
    assert os.listdir(tmp_path) == []


KINDS = st.sampled_from(sorted(COLOURS))
BARS = st.builds(
    lambda rank, start, took, kind, end, ready: Bar(
        rank=rank, start_s=start, end_s=start + took, kind=kind, end=end, ready_s=ready, is_first=kind == "failed"
    ),
    st.integers(0, 2**31),
    st.floats(0, 2e9),
    st.floats(0, 1e7),
    KINDS,
    st.text(st.characters(exclude_categories=["Cs", "Cc", "Cn", "Co"], max_codepoint=0x7F), max_size=20),
    st.none() | st.floats(0, 2e9),
)


@settings(deadline=None, max_examples=15)
@given(
    st.lists(BARS, min_size=1, max_size=60), st.lists(st.tuples(st.floats(0, 2e9), st.floats(0, 2e9)), max_size=20)
)
def test_any_timeline_can_be_drawn(bars, attempts):
    figure = draw(Timeline(title="t", bars=tuple(bars), attempts=tuple(attempts)))
    FigureCanvasAgg(figure).print_figure(io.BytesIO(), format="png", dpi=40)


def test_ranks_of_programs_have_their_names(write):
    ranks = rank(0, program="trainer", program_rank=0), rank(1, program="rollout", program_rank=0, failed=True)
    figure = draw(read_timeline([write(report(*ranks, first_failure=1))]))
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["trainer 0", "rollout 0"]
    assert "rollout 0, first: exit 0" in {text.get_text() for text in figure.axes[0].texts}
