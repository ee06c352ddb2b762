"""A request that makes no sense is refused in one line: what was given, what is allowed."""

from __future__ import annotations

import os

import pytest

from infini_run.errors import UsageError
from infini_run.options.options import resolve


def refused(*argv, **environ):
    with pytest.raises(UsageError) as caught:
        resolve([*argv, "program"], environ)
    text = str(caught.value)
    assert text.isprintable()
    return text


REFUSALS = [
    ("--nnodes=0", "--nnodes=0: expected 1 to 2147483647"),
    ("--nnodes=-1", "--nnodes=-1: expected 1"),
    ("--nnodes=1_0", "--nnodes=1_0: expected 1"),
    ("--nnodes=" + "9" * 5000, "expected 1 to"),
    ("--nnodes=1:4", "--nnodes=1:4: needs a token to join its nodes; set the same INFINI_RUN_TOKEN"),
    ("--nproc_per_node=0", "expected 1 to 4194304, auto, gpu, or cpu"),
    ("--nproc_per_node=xpu", "--nproc_per_node=xpu: expected 1 to 4194304, auto, gpu, or cpu"),
    ("--node_rank=1", "--node_rank=1: with --nnodes=1 (the default), expected a rank from 0 to 0"),
    ("--nnodes=2 --node_rank=2", "--node_rank=2: with --nnodes=2, expected a rank from 0 to 1"),
    ("--node_rank=-1", "--node_rank=-1: expected 0"),
    ("--nnodes=65536 --nproc_per_node=65536", "make 4294967296 ranks; use at most 2147483647"),
    ("--master_port=65536", "--master_port=65536: expected a port from 0 to 65535"),
    ("--master_port=-1", "a port from 0 to 65535"),
    (
        "--nnodes=2 --master_port=0",
        "--master_port=0: cannot be a free port with --nnodes=2",
    ),
    ("--nnodes=2 --rdzv_endpoint=h:0", "--rdzv_endpoint=h:0: cannot be a free port"),
    ("--rdzv_endpoint=host", "--rdzv_endpoint=host: missing port; use HOST:PORT"),
    ("--rdzv_endpoint=host:", "missing port"),
    ("--rdzv_endpoint=", "--rdzv_endpoint=: expected a host name or an address"),
    ("--rdzv_endpoint=[::1]", "missing port"),
    ("--rdzv_endpoint=:1", "expected a host name or an address"),
    (
        "--rdzv_endpoint=a::b",
        "--rdzv_endpoint=a::b: expected brackets around an IPv6 address with a port; use [IPV6]:PORT",
    ),
    ("--rdzv_endpoint=host:x", "a port from 0 to 65535"),
    ("--rdzv_endpoint=host:65536", "a port from 0 to 65535"),
    ("--master_addr=", "expected a host name or an address"),
    ("--master_addr=h:1", "expected an address without a port; use --rdzv_endpoint=HOST:PORT for both"),
    ("--rdzv_endpoint=a:5 --master_addr=b", "--rdzv_endpoint=a:5 conflicts with --master_addr=b"),
    ("--rdzv_endpoint=a:5 --master_port=6", "--rdzv_endpoint=a:5 conflicts with --master_port=6"),
    (
        "--standalone --nnodes=2",
        "--standalone conflicts with --nnodes=2: it means one node and a free port; drop one of them",
    ),
    ("--standalone --master_port=5", "--standalone conflicts with --master_port=5"),
    ("--standalone --rdzv_endpoint=a:5", "conflicts with --rdzv_endpoint=a:5"),
    ("--standalone --node_rank=1", "--node_rank=1: with --standalone, expected a rank from 0 to 0"),
    ("-m --no_python", "-m conflicts with --no_python: a module needs Python; drop one of them"),
    (
        "--engine=slrum",
        "--engine=slrum: expected local, ssh, slurm, pbs, mpi, or auto; did you mean slurm?",
    ),
    ("--engine=ssh", "--engine=ssh: needs a list of hosts; add --hosts=a,b or --hostfile=FILE"),
    ("--engine=slurm", "--engine=slurm: needs an allocation; run salloc -N2 or sbatch"),
    ("--engine=pbs", "--engine=pbs: needs an allocation; run qsub"),
    ("--engine=mpi", "--engine=mpi: needs an allocation; add --hosts=a,b"),
    ("--hosts=a,b,a", "--hosts=a,b,a: column 5"),
    ("--hosts=a:0", "--hosts=a:0: column"),
    ("--hostfile=/no/such/file", "--hostfile=/no/such/file"),
    (
        "--hosts=a,b --node_rank=1",
        "--node_rank=1 conflicts with --hosts=a,b: node ranks follow the order of the hosts",
    ),
    ("--hosts=a,b --standalone", "--standalone conflicts with --hosts=a,b: it is for one node"),
    ("--hosts=a,b --isolate", "--isolate conflicts with --hosts=a,b: it is for one node"),
    ("--hosts=a,b --hostfile=f", "--hosts=a,b conflicts with --hostfile=f: only one list of hosts"),
    ("--hosts=a,b --nnodes=3", "--nnodes=3: needs more hosts than --hosts=a,b, which is 2 hosts; add hosts"),
    ("--hosts=a:2,b", "--hosts=a:2,b: missing the number of processes for b; add --nproc_per_node=N"),
    (
        "--hosts=a:2,b:4 --nproc_per_node=3",
        "--nproc_per_node=3: needs more than the 2 slots of a in --hosts=a:2,b:4; use at most 2",
    ),
    ("--max_restarts=-1", "--max_restarts=-1: expected 0"),
    ("--restart_delay=-1", "--restart_delay=-1: not a time from 0 to"),
    ("--restart_delay=off", "--restart_delay=off: not a time from 0 to"),
    ("--restart_window=x", "--restart_window=x: not a time from 0 to"),
    ("--max_no_progress=-1", "--max_no_progress=-1: expected 0 to"),
    ("--hang_timeout=soon", "--hang_timeout=soon: not a time from 0 to"),
    ("--ready_timeout=-1", "--ready_timeout=-1: not a time from 0 to"),
    ("--on_hang=kill", "--on_hang=kill: expected report or stop"),
    ("--bind=core", "--bind=core"),
    ("--check_gpus=always", "--check_gpus=always: expected off, warn, or refuse"),
    ("--export=A=1", "--export=A=1: expected names of variables, not values"),
    ("--gpus_per_proc=-1", "expected 0"),
    ("--omp_num_threads=x", "expected auto, or 1 to"),
    ("--console=prefx", "expected auto, inherit, lines, prefix, fold, or none; did you mean prefix?"),
    ("--ranks_on_console=1", "--ranks_on_console=1: unknown rank 1; use ranks 0 to 0"),
    ("--ranks_on_console=4-2", "expected all, or ranks and ranges such as 0,4-7"),
    ("--ranks_on_console=0,,1", "expected all, or ranks"),
    ("--ranks_on_console=0-2000000000", "expected at most 1048576 ranks"),
    ("--nnodes=2 --local_ranks_filter=1", "unknown rank 1; use local ranks 0 to 0"),
    ("--stdin=1", "--stdin=1: unknown rank 1; use ranks 0 to 0"),
    ("--stdin=rank1", "--stdin=rank1: expected rank0, all, none, or a rank"),
    ("--redirects=3", "--redirects=3: needs a file; add --log_dir=DIR"),
    ("-r 0:1", "needs a file; add --log_dir=DIR (--log_dir=/dev/null drops that output)"),
    ("--tee=4", "--tee=4: expected 0 (none), 1 (stdout), 2 (stderr), 3 (both), or LOCAL_RANK:0-3,..."),
    ("--tee=0:3,", "or LOCAL_RANK:0-3,..."),
    ("--log_dir=x --tee=1:3", "--tee=1:3: unknown rank 1; use local ranks 0 to 0"),
    (
        "--grace=-1",
        "--grace=-1: not a time from 0 to 2147483647 seconds; use 10, 10s, 500ms, 2m, 1h30m, or 1d",
    ),
    ("--grace=inf", "a time from 0"),
    ("--grace=nan", "a time from 0"),
    ("--grace=10w", "a time from 0"),
    ("--grace=1e999", "a time from 0"),
    ("--grace=", "a time from 0"),
    (
        "--stop_signal=KILL",
        "--stop_signal=KILL: cannot be caught by a process; use --grace",
    ),
    ("--stop_signal=19", "cannot be caught by a process"),
    ("--stop_signal=0", "expected a signal, such as TERM, RTMIN+3, or a number up to 64"),
    ("--stop_signal=33", "expected a signal"),
    ("--stop_signal=TREM", "--stop_signal=TREM: expected a signal"),
    ("--stop_signal=RTMIN+99", "expected a signal"),
    ("--stop_signal=TERM+1", "expected a signal"),
    ("--dry_run=yaml", "--dry_run=yaml: expected text or json"),
    (
        "--rdzv_backend=etcd-v2",
        "--rdzv_backend=etcd-v2: expected static or c10d; use --rdzv_endpoint=HOST:PORT",
    ),
    (
        "--rdzv_backend=c10d --nnodes=2",
        "with --nnodes=2: rank of this node unknown; use --engine=auto to ask Slurm, PBS, MPI, or Kubernetes",
    ),
    ("--run_path", "--run_path: not supported; use the script as the program"),
    ("--logs_specs=x", "--logs_specs=x: not supported; use --log_dir"),
    ("--duplicate_stdout_filters=x", "not supported; run grep on the files of --log_dir"),
    ("--duplicate_stderr_filters=x", "not supported; run grep on the files of --log_dir"),
    (
        "--virtual_local_rank --gpus_per_proc=0",
        "--gpus_per_proc=0 conflicts with --virtual_local_rank; drop one of them",
    ),
    (
        "--numa_binding=nodes",
        "expected node, socket, exclusive, or core-complex; did you mean node?",
    ),
    ("--nproc-per-nod=2", "unknown flag --nproc-per-nod; did you mean --nproc_per_node?"),
    ("--nproc 2", "unknown flag --nproc; did you mean --nproc_per_node?"),
]


@pytest.mark.parametrize(("argv", "message"), REFUSALS)
def test_what_makes_no_sense_is_refused_in_one_line(argv, message):
    assert message in refused(*argv.split())


def test_a_bad_variable_is_named():
    assert refused(PET_NNODES="1:4").startswith("PET_NNODES=1:4: ")
    assert refused(PET_STANDALONE="true") == "PET_STANDALONE=true: expected 0 or 1"
    assert refused(INFINI_RUN_BIND="core").startswith("INFINI_RUN_BIND=core: ")
    assert refused(PET_NODE_RANK="2", INFINI_RUN_NNODES="2").startswith("PET_NODE_RANK=2: with INFINI_RUN_NNODES=2, ")


@pytest.mark.parametrize("argv", [[], ["--"], ["--nnodes=1"], ["--verbose", "--"]])
def test_no_program_is_refused_with_the_usage(argv):
    with pytest.raises(UsageError, match=r"missing program; use infini-run \[flags\] \[--\] program \[args"):
        resolve(argv, {})


def test_no_module_is_refused_with_the_usage():
    with pytest.raises(UsageError, match="missing module; use infini-run"):
        resolve(["-m"], {})


FILES = ["log_dir", "report", "trace", "events", "metrics", "termination_log"]


@pytest.mark.parametrize("flag", FILES)
def test_path_is_named_as_it_was_given(flag, infini_run, tmp_path):
    """A variable by its name, and a flag that beats it by its own."""
    (tmp_path / "file").touch()
    path, variable = f"{tmp_path}/file/x", f"INFINI_RUN_{flag.upper()}"
    for words, env, given in (
        ((), {variable: path}, f"{variable}="),
        ((f"--{flag}={path}",), {variable: str(tmp_path / "good")}, f"--{flag}="),
    ):
        command = infini_run(*words, "true", env={**os.environ, **env})
        assert command.wait() == 2
        line = command.err.decode()
        assert line.startswith(f"infini-run: {given}{path} cannot be ") or flag == "log_dir"
        assert line.startswith(f"infini-run: {given.rstrip('=')}")
        assert line.count("\n") == 1


def test_termination_log_names_the_variable_too(infini_run, tmp_path):
    env = {"INFINI_RUN_TERMINATION_LOG": str(tmp_path / "message"), "INFINI_RUN_REPORT": str(tmp_path)}
    command = infini_run("true", env={**os.environ, **env})
    assert command.wait() == 2
    assert (tmp_path / "message").read_bytes() == command.err
    assert command.err.startswith(b"infini-run: INFINI_RUN_REPORT=")
