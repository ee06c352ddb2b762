"""Several programs on one command line: where one ends, which flags are whose, and what is refused."""

from __future__ import annotations

import pytest

from infini_run.errors import UsageError
from infini_run.options.options import resolve

TWO = ("--program=trainer", "--nproc_per_node=6", "train.py", "--lr=1", ":", "--program=rollout", "serve.py")


def programs(*argv, **environ):
    return resolve(argv, environ).options.programs


def test_colon_separates_programs_with_their_own_flags():
    trainer, rollout = programs(*TWO)
    assert (trainer.name, trainer.nproc_per_node, trainer.program) == ("trainer", 6, ("train.py", "--lr=1"))
    assert (rollout.name, rollout.nproc_per_node, rollout.program) == ("rollout", 1, ("serve.py",))


def test_colon_is_an_argument_without_names():
    options = resolve(["--nproc_per_node=2", "a", ":", "--program=b", "b"], {}).options
    assert options.program == ("a", ":", "--program=b", "b")
    assert options.programs == ()


def test_double_dash_ends_flags_of_each_part():
    first, second = programs("--program=a", "--", "-x", ":", "--program=b", "--", "--module")
    assert (first.program, second.program) == (("-x",), ("--module",))


def test_one_name_alone_is_one_program():
    (only,) = programs("--program=a", "true")
    assert (only.name, only.program) == ("a", ("true",))


def test_job_flags_of_first_part_hold_for_all():
    options = resolve(["--grace=3", "--log_dir=logs", "--keep_going", *TWO], {}).options
    assert (options.grace_s, options.log_dir, options.keep_going) == (3, "logs", True)
    assert [program.name for program in options.programs] == ["trainer", "rollout"]


def test_lines_have_labels_and_ports_are_free():
    options = resolve(TWO, {}).options
    assert options.console == "prefix"
    assert [program.master_port for program in options.programs] == [0, 0]
    assert [program.master_port for program in programs("--master_port=77", *TWO)] == [77, 0]


def test_variables_set_flags_of_each_program():
    assert [each.omp_num_threads for each in programs(*TWO, INFINI_RUN_OMP_NUM_THREADS="3")] == [3, 3]
    assert [each.nproc_per_node for each in programs(*TWO, PET_NPROC_PER_NODE="2")] == [6, 2]


def test_variable_names_no_program():
    options = resolve(["echo", ":", "echo"], {"INFINI_RUN_PROGRAM": "a"}).options
    assert (options.name, options.programs, options.program) == ("", (), ("echo", ":", "echo"))


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (("--program=a", "x", ":"), "':' at the end: missing program; add --program=NAME and a program, or drop ':'"),
        (
            ("--program=a", "x", ":", ":", "--program=b", "y"),
            "':' ':': missing program; add --program=NAME and a program between them, or drop one",
        ),
        (("--program=a", "x", ":", "y"), "':' y: missing --program=NAME; use : --program=NAME y"),
        (
            ("--program=a", "x", ":", "--nproc_per_node=2", "y"),
            "':' --nproc_per_node=2: missing --program=NAME; use : --program=NAME --nproc_per_node=2",
        ),
        (
            ("--program=a", ":", "--program=b", "y"),
            "--program=a: missing program; use --program=a [flags] program ...",
        ),
        (
            ("--program=a", "x", ":", "--program=b"),
            "--program=b: missing program; use --program=b [flags] program ...",
        ),
        (("--program=a",), "--program=a: missing program; use --program=a [flags] program ..."),
        (
            ("--program=a", "x", ":", "--program=a", "y"),
            "--program=a: already the name of another program; use another one",
        ),
        (
            ("--program=a", "x", *(word for n in "bc" for word in (":", f"--program={n}", "--log_dir=l", "x"))),
            "--log_dir=l: already the folder of another program; use another one",
        ),
        (
            ("--program=a", "x", ":", "--program=b", "--max_restarts=1", "y"),
            "--max_restarts=1: cannot hold for one of several programs; add --restart_scope=program, or ...",
        ),
        (("--program=a", "x", ":", "--help"), "--help: cannot be asked of one program; use it alone"),
        (("--program=a", "x", ":", "--program=b", "--nproc=x", "y"), "unknown flag --nproc; ..."),
        (("--program=a b", "x"), "--program=a b: expected a letter, ..."),
        (("--program=7", "x"), "--program=7: expected a letter, ..."),
        (("--program=all", "x"), "--program=all: expected a letter, ..."),
        (("--program=", "x"), "--program=: expected a letter, ..."),
        (("--program=" + "a" * 65, "x"), f"--program={'a' * 65}: expected a letter, ..."),
        (("--one_world", "x"), "--one_world: needs programs with names; add --program=NAME"),
        (("--ends_job", "x"), "--ends_job: needs programs with names; add --program=NAME"),
        (("--after=a", "x"), "--after=a: needs programs with names; add --program=NAME"),
        (("--ready_port=1", "x"), "--ready_port=1: needs programs with names; add --program=NAME"),
        (("--after=x", *TWO), "--after=x: unknown program x; use trainer, rollout"),
        (("--after=a b", *TWO), "--after=a b: expected a letter, ..."),
        (
            ("--after=trainer", *TWO),
            "trainer --after=trainer: cannot be: each waits for the next one; drop one of them",
        ),
        (
            (
                "--program=a",
                "--after=b",
                "x",
                ":",
                "--program=b",
                "--after=c",
                "y",
                ":",
                "--program=c",
                "--after=b",
                "z",
            ),
            "b --after=c, c --after=b: cannot be: each waits for the next one; drop one of them",
        ),
        (("--keep_going", "--after=rollout", *TWO), "--after: conflicts with --keep_going: a failed program is ..."),
        (("--on_nodes=0", "x"), "--on_nodes=0: needs programs with names; add --program=NAME"),
        (("--on_nodes=2-1", *TWO), "--on_nodes=2-1: expected all, rest, or nodes and ranges such as 0,4-7"),
        (("--on_nodes=1", *TWO), "--on_nodes=1: unknown node 1; use node 0"),
        (("--hosts=a,b", "--on_nodes=0,2", *TWO), "--on_nodes=0,2: unknown node 2; use nodes 0 to 1"),
        (
            ("--hosts=a,b", "--program=a", "--on_nodes=0-1", "x", ":", "--program=b", "--on_nodes=rest", "y"),
            "--on_nodes=rest: cannot be: the other programs list all nodes; list fewer",
        ),
        (
            ("--hosts=a,b", "--program=a", "--on_nodes=1", "x", ":", "--program=b", "--on_nodes=1", "y"),
            "--on_nodes=1, --on_nodes=1: node 0 runs no program; add it to one, or use --on_nodes=rest",
        ),
        (
            ("--nnodes=2", *TWO),
            "--nnodes=2: several programs need one head; ...",
        ),
        (("--nnodes=2", "--dry_run", *TWO), "--dry_run with --nnodes=2: the ranks of other nodes ..."),
        (("--nnodes=1:2", *TWO), "--nnodes=1:2: conflicts with --program=trainer: several programs need all of ..."),
        (
            ("--hosts=a:7,b:6", *TWO),
            "--hosts=a:7,b:6: needs more than the 6 slots of b for 7 ranks of all ...",
        ),
        (
            ("--spares=1", *TWO),
            "--spares=1: conflicts with --program=trainer: several programs need all of ...",
        ),
        (("--role=x", *TWO), "--role=x: conflicts with --program=trainer: the name of a program is its role; ..."),
        (("--preload=json", *TWO), "--preload=json: conflicts with --program=trainer: the process that imports ..."),
        (
            ("--virtual_local_rank", *TWO),
            "--virtual_local_rank: conflicts with --program=trainer: each program counts its own local ranks; ...",
        ),
        (
            ("--log_layout=torchrun", "--log_dir=l", *TWO),
            "--log_layout=torchrun: conflicts with --program=trainer: torchrun's folders have no place for a ...",
        ),
        (
            ("--console=fold", *TWO),
            "--console=fold: conflicts with --program=trainer: equal lines of several programs are not folded; ...",
        ),
    ],
)
def test_bad_input_is_one_line(argv, line):
    with pytest.raises(UsageError) as raised:
        resolve(argv, {})
    text = str(raised.value)
    assert "\n" not in text
    start, dots, _ = line.partition("...")
    assert text.startswith(start) if dots else text == line


def test_programs_are_on_the_nodes_that_they_list():
    words = ("--program=a", "--on_nodes=0-1", "x", ":", "--program=b", "--on_nodes=rest", "y")
    options = resolve(("--hosts=h[1-4]", *words, ":", "--program=c", "z"), {}).options
    assert [each.on_nodes for each in options.programs] == [(0, 1), (2, 3), None]
    counts = [[each.nproc_per_node for each in options.on_node(node).programs] for node in range(4)]
    assert counts == [[1, 0, 1], [1, 0, 1], [0, 1, 1], [0, 1, 1]]


def test_nodes_by_hand_need_their_rank():
    words = ("--nnodes=2", "--rdzv_endpoint=h:1", "--on_nodes=0", *TWO)
    with pytest.raises(UsageError, match=r"^--on_nodes of trainer: needs the rank of this node; add --node_rank=N$"):
        resolve(words, {"INFINI_RUN_TOKEN": "t" * 20})
    assert resolve(("--node_rank=1", *words), {"INFINI_RUN_TOKEN": "t" * 20}).options.node_rank == 1


def test_room_of_hosts_is_no_number_of_ranks():
    options = resolve(("--hosts=a:8,b:16", "--program=a", "x"), {}).options
    assert [each.nproc_per_node for each in options.programs] == [1]


def test_refused_flag_of_a_variable_is_named():
    with pytest.raises(UsageError, match=r"^INFINI_RUN_SPARES=1: conflicts with --program=trainer: "):
        resolve(TWO, {"INFINI_RUN_SPARES": "1"})
