"""A request that makes no sense is refused in one line: what was given, what is allowed."""

from __future__ import annotations

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
    ("--nnodes=0", "--nnodes=0: a whole number from 1 to 2147483647 is allowed"),
    ("--nnodes=-1", "--nnodes=-1: a whole number from 1"),
    ("--nnodes=1_0", "--nnodes=1_0: a whole number"),
    ("--nnodes=" + "9" * 5000, "a whole number from 1 to"),
    ("--nnodes=1:4", "--nnodes=1:4: a token joins the nodes of such a job: set INFINI_RUN_TOKEN"),
    ("--nproc_per_node=0", "a whole number from 1 to 4194304, auto, gpu or cpu is allowed"),
    ("--nproc_per_node=xpu", "--nproc_per_node=xpu: a whole number from 1 to 4194304, auto, gpu or cpu"),
    ("--node_rank=1", "--node_rank=1: with --nnodes=1 (the default) a rank from 0 to 0 is allowed"),
    ("--nnodes=2 --node_rank=2", "--node_rank=2: with --nnodes=2 a rank from 0 to 1 is allowed"),
    ("--node_rank=-1", "--node_rank=-1: a whole number from 0"),
    ("--nnodes=65536 --nproc_per_node=65536", "make 4294967296 ranks: at most 2147483647 are allowed"),
    ("--master_port=65536", "--master_port=65536: a port from 0 to 65535 is allowed"),
    ("--master_port=-1", "a port from 0 to 65535"),
    (
        "--nnodes=2 --master_port=0",
        "--master_port=0: a free port is for one node; with --nnodes=2 a port from 1",
    ),
    ("--nnodes=2 --rdzv_endpoint=h:0", "--rdzv_endpoint=h:0: a free port is for one node"),
    ("--rdzv_endpoint=host", "--rdzv_endpoint=host: the port is missing: HOST:PORT is allowed"),
    ("--rdzv_endpoint=host:", "the port is missing"),
    ("--rdzv_endpoint=", "--rdzv_endpoint=: a host name or an address is allowed"),
    ("--rdzv_endpoint=[::1]", "the port is missing"),
    ("--rdzv_endpoint=:1", "a host name or an address is allowed"),
    (
        "--rdzv_endpoint=a::b",
        "--rdzv_endpoint=a::b: an IPv6 address with a port is written in brackets: [IPV6]:PORT",
    ),
    ("--rdzv_endpoint=host:x", "a port from 0 to 65535"),
    ("--rdzv_endpoint=host:65536", "a port from 0 to 65535"),
    ("--master_addr=", "a host name or an address is allowed"),
    ("--master_addr=h:1", "an address without port is allowed: --rdzv_endpoint=HOST:PORT takes both"),
    ("--rdzv_endpoint=a:5 --master_addr=b", "--rdzv_endpoint=a:5 and --master_addr=b contradict each other"),
    ("--rdzv_endpoint=a:5 --master_port=6", "--rdzv_endpoint=a:5 and --master_port=6 contradict each other"),
    (
        "--standalone --nnodes=2",
        "--standalone is one node and a free port, --nnodes=2 is not: drop one of them",
    ),
    ("--standalone --master_port=5", "--standalone is one node and a free port, --master_port=5 is not"),
    ("--standalone --rdzv_endpoint=a:5", "--rdzv_endpoint=a:5 is not"),
    ("--standalone --node_rank=1", "--node_rank=1: with --standalone a rank from 0 to 0"),
    ("-m --no_python", "-m and --no_python: a module needs Python, drop one of them"),
    (
        "--engine=slrum",
        "--engine=slrum: local, ssh, slurm, pbs, mpi or auto is allowed (the nearest is slurm)",
    ),
    ("--engine=ssh", "--engine=ssh needs --hosts=a,b or --hostfile=FILE"),
    ("--engine=slurm", "--engine=slurm: there is no allocation here; salloc -N2 or sbatch makes one"),
    ("--engine=pbs", "--engine=pbs: there is no allocation here; qsub makes one"),
    ("--engine=mpi", "--engine=mpi: there is no allocation here; give --hosts=a,b"),
    ("--hosts=a,b,a", "--hosts=a,b,a: column 5"),
    ("--hosts=a:0", "--hosts=a:0: column"),
    ("--hostfile=/no/such/file", "--hostfile=/no/such/file"),
    ("--hosts=a,b --node_rank=1", "--node_rank=1 with --hosts=a,b: node ranks follow the order of the hosts"),
    ("--hosts=a,b --standalone", "--standalone with --hosts=a,b: it is for one node"),
    ("--hosts=a,b --isolate", "--isolate with --hosts=a,b: it is for one node"),
    ("--hosts=a,b --hostfile=f", "--hosts=a,b and --hostfile=f: one list of hosts is enough"),
    ("--hosts=a,b --nnodes=3", "--nnodes=3, but --hosts=a,b is 2 hosts"),
    ("--hosts=a:2,b", "--hosts=a:2,b does not say how many processes b has room for: give --nproc_per_node"),
    ("--hosts=a:2,b:4 --nproc_per_node=3", "--nproc_per_node=3, but --hosts=a:2,b:4 has room for 2 on a"),
    ("--max_restarts=-1", "--max_restarts=-1: a whole number from 0"),
    ("--restart_delay=-1", "--restart_delay=-1: a time from 0 to"),
    ("--restart_delay=off", "--restart_delay=off: a time from 0 to"),
    ("--restart_window=x", "--restart_window=x: a time from 0 to"),
    ("--max_no_progress=-1", "--max_no_progress=-1: a whole number from 0 to"),
    ("--hang_timeout=soon", "--hang_timeout=soon: a time from 0 to"),
    ("--ready_timeout=-1", "--ready_timeout=-1: a time from 0 to"),
    ("--on_hang=kill", "--on_hang=kill: report or stop is allowed"),
    ("--bind=core", "--bind=core"),
    ("--check_gpus=always", "--check_gpus=always: off, warn or refuse is allowed"),
    ("--export=A=1", "--export=A=1: names of variables are allowed, not values"),
    ("--gpus_per_proc=-1", "a whole number from 0"),
    ("--omp_num_threads=x", "auto or a whole number from 1 to"),
    ("--console=prefx", "--console=prefx: auto, inherit, lines, prefix or none is allowed (the nearest is prefix)"),
    ("--ranks_on_console=1", "--ranks_on_console=1: there is no rank 1, ranks from 0 to 0 are allowed"),
    ("--ranks_on_console=4-2", "all or a list of ranks and ranges is allowed, such as 0,4-7"),
    ("--ranks_on_console=0,,1", "all or a list of ranks"),
    ("--ranks_on_console=0-2000000000", "at most 1048576 ranks can be listed"),
    ("--nnodes=2 --local_ranks_filter=1", "there is no rank 1, local ranks from 0 to 0 are allowed"),
    ("--stdin=1", "--stdin=1: there is no rank 1, ranks from 0 to 0 are allowed"),
    ("--stdin=rank1", "--stdin=rank1: rank0, all, none or a rank is allowed"),
    ("--redirects=3", "--redirects=3 needs --log_dir=DIR"),
    ("-r 0:1", "--log_dir=DIR: there is no file to write to without it (--log_dir=/dev/null drops that output)"),
    ("--tee=4", "--tee=4: 0 (none), 1 (stdout), 2 (stderr), 3 (both) or LOCAL_RANK:0-3,... is allowed"),
    ("--tee=0:3,", "LOCAL_RANK:0-3,... is allowed"),
    ("--log_dir=x --tee=1:3", "--tee=1:3: there is no rank 1, local ranks from 0 to 0 are allowed"),
    (
        "--grace=-1",
        "--grace=-1: a time from 0 to 2147483647 seconds is allowed, such as 10, 10s, 500ms, 2m, 1h30m or 1d",
    ),
    ("--grace=inf", "a time from 0"),
    ("--grace=nan", "a time from 0"),
    ("--grace=10w", "a time from 0"),
    ("--grace=1e999", "a time from 0"),
    ("--grace=", "a time from 0"),
    (
        "--stop_signal=KILL",
        "--stop_signal=KILL: a process cannot catch it, so it asks for nothing; --grace says",
    ),
    ("--stop_signal=19", "a process cannot catch it"),
    ("--stop_signal=0", "a signal is allowed, such as TERM, RTMIN+3 or a number up to 64"),
    ("--stop_signal=33", "a signal is allowed"),
    ("--stop_signal=TREM", "--stop_signal=TREM: a signal is allowed"),
    ("--stop_signal=RTMIN+99", "a signal is allowed"),
    ("--stop_signal=TERM+1", "a signal is allowed"),
    ("--dry_run=yaml", "--dry_run=yaml: text or json is allowed"),
    (
        "--rdzv_backend=etcd-v2",
        "--rdzv_backend=etcd-v2: static or c10d is allowed; --rdzv_endpoint=HOST:PORT says",
    ),
    (
        "--rdzv_backend=c10d --nnodes=2",
        "with --nnodes=2: which node is this? --engine=auto asks Slurm, PBS, MPI or Kubernetes; with the same",
    ),
    ("--run_path", "--run_path: this cannot be honoured; give the script as the program"),
    ("--logs_specs=x", "--logs_specs=x: this cannot be honoured; use --log_dir"),
    ("--duplicate_stdout_filters=x", "this cannot be honoured; search the files of --log_dir"),
    ("--duplicate_stderr_filters=x", "this cannot be honoured; search the files of --log_dir"),
    (
        "--virtual_local_rank --gpus_per_proc=0",
        "--gpus_per_proc=0 and --virtual_local_rank contradict each other: drop one of them",
    ),
    (
        "--numa_binding=nodes",
        "node, socket, exclusive or core-complex is allowed (the nearest is node)",
    ),
    ("--nproc-per-nod=2", "there is no flag --nproc-per-nod; the nearest is --nproc_per_node"),
    ("--nproc 2", "there is no flag --nproc; the nearest is --nproc_per_node"),
]


@pytest.mark.parametrize(("argv", "message"), REFUSALS)
@pytest.mark.rows(24)
def test_what_makes_no_sense_is_refused_in_one_line(argv, message):
    assert message in refused(*argv.split())


def test_a_bad_variable_is_named():
    assert refused(PET_NNODES="1:4").startswith("PET_NNODES=1:4: ")
    assert refused(PET_STANDALONE="true") == "PET_STANDALONE=true: 0 or 1 is allowed"
    assert refused(INFINI_RUN_BIND="core").startswith("INFINI_RUN_BIND=core: ")
    assert refused(PET_NODE_RANK="2", INFINI_RUN_NNODES="2").startswith("PET_NODE_RANK=2: with INFINI_RUN_NNODES=2 ")


@pytest.mark.parametrize("argv", [[], ["--"], ["--nnodes=1"], ["--verbose", "--"]])
def test_no_program_is_refused_with_the_usage(argv):
    with pytest.raises(UsageError, match=r"no program was given: infini-run \[flags\] \[--\] program \[args"):
        resolve(argv, {})


def test_no_module_is_refused_with_the_usage():
    with pytest.raises(UsageError, match="no module was given: infini-run"):
        resolve(["-m"], {})
