"""What each engine's variables mean. The vectors were recorded from the engines where they run here (Slurm 22.05,
Open MPI 4.1, MPICH 4.0, OpenPBS 23.06, Grid Engine 8.1), and taken from their documentation elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import infini_run
from infini_run.environments.detect import DETECTORS, detect
from infini_run.environments.environment import ClusterEnvironment, derived_port
from infini_run.environments.hostlist import Host
from infini_run.environments.launcher_variables import without_launcher_variables
from infini_run.environments.slurm import explain_binding
from infini_run.errors import UsageError

BATCH_SCRIPT = {
    "SLURM_JOB_ID": "8",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_TASKS_PER_NODE": "1(x2)",
    "SLURMD_NODENAME": "node1",
}
SRUN = BATCH_SCRIPT | {
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NODELIST": "node[2-4]",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
    "SLURM_NODEID": "2",
    "SLURM_PROCID": "2",
    "SLURM_LAUNCH_NODE_IPADDR": "10.9.9.9",
    "SLURMD_NODENAME": "node4",
}
# Components of one node and of two, whose names sort the other way round: what 22.05 sets.
HET = {
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_ID": "8",
    "SLURM_JOB_ID_HET_GROUP_0": "8",
    "SLURM_JOB_ID_HET_GROUP_1": "9",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "node3",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "node[1-2]",
    "SLURM_TASKS_PER_NODE_HET_GROUP_0": "1",
    "SLURM_TASKS_PER_NODE_HET_GROUP_1": "1(x2)",
}
HET_SCRIPT = BATCH_SCRIPT | HET | {
    "SLURM_JOB_NODELIST": "node3", "SLURM_JOB_NUM_NODES": "1", "SLURM_NNODES": "1", "SLURMD_NODENAME": "node3",
    "SLURM_GPUS_ON_NODE": "1",
}  # fmt: skip
HET_STEP = SRUN | HET | {
    "SLURM_JOB_NODELIST": "node[1-3]", "SLURM_STEP_NODELIST": "node[1-3]", "SLURM_NODEID": "0",
    "SLURM_PROCID": "0", "SLURMD_NODENAME": "node3",
}  # fmt: skip
OPENMPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_COMM_WORLD_NODE_RANK": "0",
    "OMPI_MCA_orte_hnp_uri": "536936448.0;tcp://127.0.0.1:56671",
    "OMPI_MCA_ess_base_jobid": "536936449",
    "PMIX_NAMESPACE": "536936449",
    "PMIX_RANK": "3",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "8", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
PBS = {"PBS_JOBID": "17.head", "PBS_NODEFILE": "/nodes", "PBS_ENVIRONMENT": "PBS_BATCH", "PBS_NODENUM": "0"}
LSF = {"LSB_JOBID": "99", "LSB_MCPU_HOSTS": "launch 1 a 4 b 4", "LSB_HOSTS": "launch a a a a b b b b"}
JSM = {
    "JSM_NAMESPACE_RANK": "1",
    "JSM_NAMESPACE_SIZE": "2",
    "JSM_NAMESPACE_LOCAL_RANK": "0",
    "JSM_NAMESPACE_LOCAL_SIZE": "1",
}
FLUX = {
    "FLUX_JOB_ID": "ƒ2e73NP",
    "FLUX_TASK_RANK": "1",
    "FLUX_TASK_LOCAL_ID": "0",
    "FLUX_JOB_SIZE": "2",
    "FLUX_JOB_NNODES": "2",
}
LWS = {"LWS_LEADER_ADDRESS": "lws-0.lws.default", "LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": "3"}
JOB = {"JOB_COMPLETION_INDEX": "2", "KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "train-2"}
FILES = {
    "/nodes": "n1\nn1\nn2\nn2\n",
    "/var/spool/pbs/aux/17.head": "n1\nn2\n",
    "/uneven": "n1\nn1\nn2\n",
    "/pe": "node2 8 all.q@node2 UNDEFINED\nnode1 4 all.q@node1 UNDEFINED\nnode2 2 more.q@node2 UNDEFINED\n",
    "/etc/hosts": "127.0.0.1 localhost\n10.1.2.3 train-2.svc.space.svc.cluster.local train-2 # pod\n",
}


def reader(files):
    def read(path):
        if path not in files:
            raise FileNotFoundError(path)
        return files[path]

    return read


def found(environ, files=None, **changes):
    return detect(environ | changes, reader(FILES if files is None else files))


def named(*names, slots=0):
    return tuple(Host(name=name, slots=slots) for name in names)


# engine: environment, what is found
VECTORS = {
    "slurm, one task on each node": (
        SRUN,
        {
            "engine": "slurm", "form": "step", "nnodes": 3, "node_rank": 2, "hosts": named("node2", "node3", "node4"),
            "master_addr": "node2", "master_port": 29500 + 8 + 3 * 97, "job_id": "8.3", "is_task": False, "nproc": 0,
        },
    ),
    "slurm, one task on each node, with GPUs": (SRUN | {"SLURM_GPUS_ON_NODE": "8"}, {"gpus": 8, "nproc": 0}),
    "slurm, several tasks on each node": (
        SRUN | {
            "SLURM_STEP_TASKS_PER_NODE": "4(x3)", "SLURM_STEP_NUM_TASKS": "12", "SLURM_PROCID": "9",
            "SLURM_LOCALID": "1", "SLURM_GPUS_ON_NODE": "4",
        },
        {
            "is_task": True, "tasks_per_node": 4, "local_rank": 1, "rank": 9, "world_size": 12, "node_rank": 2,
            "nproc": 0,
        },
    ),
    "slurm, uneven, and we are alone on ours": (
        SRUN | {"SLURM_STEP_TASKS_PER_NODE": "3,1(x2)", "SLURM_STEP_NUM_TASKS": "5", "SLURM_PROCID": "4"},
        {"is_task": True, "tasks_per_node": 1, "local_rank": 0, "rank": 4, "world_size": 5},
    ),
    "slurm, a batch script": (
        BATCH_SCRIPT,
        {
            "form": "batch", "nnodes": 2, "node_rank": 0, "hosts": named("node1", "node2"), "nproc": 0,
            "master_port": 29508, "job_id": "8", "is_task": False,
        },
    ),
    "slurm, a batch script with tasks": (BATCH_SCRIPT | {"SLURM_NTASKS_PER_NODE": "4"}, {"nproc": 4}),
    "slurm, a batch script with GPUs": (
        BATCH_SCRIPT | {"SLURM_NTASKS_PER_NODE": "4", "SLURM_GPUS_ON_NODE": "8"},
        {"nproc": 4, "gpus": 8},
    ),
    "slurm, salloc's shell elsewhere": (
        {"SLURM_JOB_ID": "8", "SLURM_JOB_NODELIST": "node1", "SLURM_JOB_NUM_NODES": "1"},
        {"form": "batch", "nnodes": 1, "node_rank": -1},
    ),
    "slurm, salloc's shell as a step of Slurm's own": (
        BATCH_SCRIPT | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_NODES": "1"}, {"form": "batch", "nnodes": 2},
    ),
    "slurm, a batch script of several components": (
        HET_SCRIPT,
        {
            "form": "batch", "nnodes": 3, "node_rank": 0, "hosts": named("node3", "node1", "node2"), "nproc": 0,
            "gpus": 0, "master_addr": "node3", "master_port": 29508, "job_id": "8",
        },
    ),
    "slurm, salloc's shell of several components": (
        HET, {"form": "batch", "nnodes": 3, "node_rank": -1, "hosts": named("node3", "node1", "node2")},
    ),
    "slurm, components with tasks": (
        HET | {
            "SLURM_NTASKS_HET_GROUP_0": "2", "SLURM_TASKS_PER_NODE_HET_GROUP_0": "2",
            "SLURM_NTASKS_PER_NODE_HET_GROUP_1": "1",
        },
        {"hosts": (Host(name="node3", slots=2), Host(name="node1", slots=1), Host(name="node2", slots=1))},
    ),
    "slurm, a component with tasks": (
        HET | {"SLURM_NTASKS_HET_GROUP_0": "1"}, {"hosts": (Host(name="node3", slots=1), *named("node1", "node2"))},
    ),
    "slurm, a step of several components": (
        HET_STEP,
        {"nnodes": 3, "node_rank": 0, "hosts": named("node3", "node1", "node2"), "master_addr": "node3"},
    ),
    "slurm, several tasks on a node of a component": (
        HET_STEP | {
            "SLURM_STEP_TASKS_PER_NODE": "1(x2),2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1",
            "SLURM_LOCALID": "1",
        },
        {"is_task": True, "node_rank": 0, "tasks_per_node": 2, "local_rank": 1, "rank": 1, "world_size": 4},
    ),
    "slurm, a step of one component": (
        HET_STEP | {
            "SLURM_STEP_NODELIST": "node[1-2]", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_NODEID": "1", "SLURM_PROCID": "1",
            "SLURMD_NODENAME": "node2",
        },
        {"nnodes": 2, "node_rank": 1, "hosts": named("node1", "node2"), "master_addr": "node1"},
    ),
    "slurm, a job that a job of several components has submitted": (
        HET_SCRIPT | {"SLURM_JOB_ID": "11", "SLURM_JOB_NODELIST": "node4", "SLURMD_NODENAME": "node4"},
        {"nnodes": 1, "node_rank": 0, "hosts": named("node4"), "gpus": 1},
    ),
    "slurm, srun --mpi=pmi2": (SRUN | {"PMI_RANK": "2", "PMI_SIZE": "3", "PMI_FD": "9"}, {"engine": "slurm"}),
    "slurm, srun --mpi=pmix": (SRUN | {"PMIX_RANK": "2", "PMIX_NAMESPACE": "slurm.pmix.8.3"}, {"engine": "slurm"}),
    "slurm, srun on a Cray": (
        SRUN | {"PALS_RANKID": "2", "PMI_RANK": "2", "PMI_SIZE": "3", "PMI_LOCAL_RANK": "0", "PMI_LOCAL_SIZE": "1"},
        {"engine": "slurm"},
    ),
    "openmpi, one process on each node": (
        OPENMPI,
        {
            "engine": "openmpi", "nnodes": 4, "node_rank": 3, "master_addr": "", "job_id": "536936449",
            "master_port": 29500 + 536936449 % 3200, "is_task": False,
        },
    ),
    "openmpi, several": (
        OPENMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
        {"is_task": True, "nnodes": 2, "node_rank": 1, "rank": 3, "local_rank": 1, "world_size": 4},
    ),
    "openmpi in a Slurm job, under mpirun's own srun": (
        SRUN | OPENMPI | {"SLURM_JOB_NODELIST": "n[1-4]", "SLURM_JOB_NUM_NODES": "4"},
        {"engine": "openmpi", "master_addr": "n1", "hosts": named("n1", "n2", "n3", "n4")},
    ),
    "openmpi on a part of a Slurm job": (BATCH_SCRIPT | OPENMPI, {"engine": "openmpi", "master_addr": ""}),
    "openmpi in a PBS job": (
        OPENMPI | PBS | {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"},
        {"engine": "openmpi", "master_addr": "n1"},
    ),
    "hydra, one process on each node": (
        HYDRA, {"engine": "hydra", "nnodes": 4, "node_rank": 3, "master_port": 0, "is_task": False},
    ),
    "hydra in a Slurm job": (
        BATCH_SCRIPT | HYDRA | {"PMI_SIZE": "2", "PMI_RANK": "1"},
        {"engine": "hydra", "node_rank": 1, "master_addr": "node1", "master_port": 29508},
    ),
    "hydra, several": (
        HYDRA | {"MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"}, {"is_task": True, "nnodes": 2, "node_rank": 1},
    ),
    "hydra, MVAPICH": (
        {f"MV2_COMM_WORLD_{name}": value for name, value in
         {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}.items()},
        {"engine": "hydra", "nnodes": 2, "node_rank": 1},
    ),
    "pals": (
        {"PALS_RANKID": "1", "PALS_APID": "x-9", "PMI_RANK": "1", "PMI_SIZE": "2", "PMI_LOCAL_RANK": "0",
         "PMI_LOCAL_SIZE": "1"} | PBS,
        {"engine": "pals", "nnodes": 2, "node_rank": 1, "master_addr": "n1", "job_id": "x-9"},
    ),
    "flux, one task on each node": (
        FLUX,
        {"engine": "flux", "nnodes": 2, "node_rank": 1, "is_task": False, "job_id": "ƒ2e73NP"},
    ),
    "flux, several": (
        SRUN | FLUX | {"FLUX_TASK_RANK": "3", "FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_SIZE": "4"},
        {"engine": "flux", "is_task": True, "tasks_per_node": 2, "node_rank": 1},
    ),
    "pmix alone": (
        {"PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-a-12@1", "PMIX_HOSTNAME": "b"},
        {"engine": "pmix", "nnodes": 0, "node_rank": 1, "master_addr": ""},
    ),
    "pbs, the job script": (
        PBS,
        {
            "engine": "pbs", "form": "batch", "nnodes": 2, "node_rank": 0, "hosts": named("n1", "n2", slots=2),
            "nproc": 2, "master_addr": "n1", "master_port": 29517, "job_id": "17.head",
        },
    ),
    "pbs, the job script by its task number": (PBS | {"PBS_TASKNUM": "00000001"}, {"form": "batch"}),
    "pbs, a task on another node": (
        PBS | {"PBS_TASKNUM": "08000001", "PBS_NODENUM": "1"}, {"form": "step", "nnodes": 2, "node_rank": 1},
    ),
    "pbs, a task on the first node, without PBS_NODEFILE": (
        {"PBS_JOBID": "17.head", "PBS_NODENUM": "0", "PBS_TASKNUM": "00000002", "PBS_ENVIRONMENT": "PBS_BATCH"},
        {"form": "step", "nnodes": 2, "node_rank": 0, "master_addr": "n1"},
    ),
    "pbs, uneven": (PBS | {"PBS_NODEFILE": "/uneven"}, {"nproc": 2, "counts": (2, 1), "nnodes": 2}),
    "pbs, uneven, a task on another node": (
        PBS | {"PBS_NODEFILE": "/uneven", "PBS_TASKNUM": "08000001", "PBS_NODENUM": "1"},
        {"nproc": 1, "counts": (2, 1), "node_rank": 1},
    ),
    "lsf, the job script": (
        LSF,
        {
            "engine": "lsf", "form": "batch", "nnodes": 3, "master_port": 29599,
            "hosts": (*named("launch", slots=1), *named("a", "b", slots=4)),
        },
    ),
    "lsf, a task of jsrun": (
        LSF | JSM,
        {"form": "step", "nnodes": 2, "node_rank": 1, "master_addr": "a", "hosts": named("a", "b", slots=4)},
    ),
    "lsf, a task of jsrun on a part of the hosts": (
        LSF | JSM | {"JSM_NAMESPACE_RANK": "0", "JSM_NAMESPACE_SIZE": "1"},
        {"form": "step", "nnodes": 1, "master_addr": ""},
    ),
    "gridengine": (
        {"PE_HOSTFILE": "/pe", "JOB_ID": "5", "SGE_ROOT": "/sge", "NHOSTS": "2"},
        {
            "engine": "gridengine", "form": "batch", "nnodes": 2, "master_addr": "node2", "master_port": 29505,
            "hosts": (Host(name="node2", slots=10), Host(name="node1", slots=4)),
        },
    ),
    "lws": (
        LWS,
        {
            "engine": "lws", "form": "step", "nnodes": 4, "node_rank": 3, "master_addr": "lws-0.lws.default",
            "master_port": 0,
        },
    ),
    "pod_variables, PyTorchJob": (
        {"MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": "2", "RANK": "1"},
        {"engine": "pod_variables", "nnodes": 2, "node_rank": 1, "master_addr": "job-master-0", "master_port": 23456},
    ),
    "pod_variables, DLC": (
        {"MASTER_ADDR": "m", "WORLD_SIZE": "2", "RANK": "1", "NPROC_PER_NODE": "8"}, {"nproc": 8, "master_port": 0},
    ),
    "pod_variables, Azure ML": (
        {"MASTER_ADDR": "10.0.0.4", "MASTER_PORT": "6105", "NODE_RANK": "1", "AZUREML_NODE_COUNT": "2"},
        {"nnodes": 2, "node_rank": 1},
    ), "pod_variables, Lightning": ({"MASTER_ADDR": "m", "NODE_RANK": "1", "NNODES": "2"}, {"nnodes": 2, "node_rank":
    1}), "kubernetes, an Indexed Job": (
        JOB,
        {"engine": "kubernetes", "nnodes": 0, "node_rank": 2, "master_addr": "train-0.svc.space.svc.cluster.local"},
    ),
    "kubernetes, an Indexed Job without a service": (
        JOB | {"HOSTNAME": "other-2"}, {"nnodes": 0, "node_rank": 2, "master_addr": ""},
    ),
    "sagemaker": (
        {"SM_HOSTS": '["algo-2", "algo-1", "algo-10"]', "SM_CURRENT_HOST": "algo-2", "SM_NUM_GPUS": "8"},
        {"engine": "sagemaker", "nnodes": 3, "node_rank": 2, "master_addr": "algo-1", "gpus": 8, "master_port": 0},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("environ", "wanted"), VECTORS.values(), ids=VECTORS)
def test_an_engine_is_found_by_its_variables(environ, wanted):
    site = found(environ)
    assert {name: getattr(site, name) for name in wanted} == wanted


def test_every_engine_has_a_vector_and_a_line_in_the_documentation():
    engines = {detector.__module__.rpartition(".")[2] for detector in DETECTORS}
    assert {name.partition(",")[0].split()[0] for name in VECTORS} == engines
    rows = (Path(infini_run.__path__[0]).parent / "docs/reference/environments.md").read_text().splitlines()
    order = [row.split("`")[1] for row in rows if row.startswith("| `") and row.split("`")[1] in engines]
    assert order == [detector.__module__.rpartition(".")[2] for detector in DETECTORS]


def test_nothing_is_found_in_a_plain_environment():
    assert found({"PATH": "/bin", "HOME": "/root", "HOSTNAME": "node-1"}) is None


def test_a_rank_of_ours_or_of_torchrun_is_no_pod():
    assert found({"MASTER_ADDR": "m", "WORLD_SIZE": "8", "RANK": "3", "LOCAL_RANK": "3"}) is None


def test_an_empty_variable_is_not_set():
    assert found(dict.fromkeys(SRUN, "")) is None


@pytest.mark.parametrize("environ", [environ for environ, _ in VECTORS.values()], ids=VECTORS)
def test_every_value_says_from_which_variable_it_is(environ):
    site = found(environ)
    for name, text in site.sources:
        assert getattr(site, name) not in (None, ""), name
        for part in text.removeprefix("derived from ").split(", ") if text.startswith("derived") else [text]:
            variable = part.partition("=")[0]
            assert variable in environ, part
    for name in ("nnodes", "master_addr", "hosts"):
        if getattr(site, name):
            assert site.source(name), name


def test_jobset_of_one_job_counts_and_of_several_does_not():
    hosts = {"/etc/hosts": "10.0.0.1 set-workers-{0}-2.set.ns.svc.cluster.local set-workers-{0}-2"}
    files = {job: {"/etc/hosts": hosts["/etc/hosts"].format(job)} for job in (0, 1)}
    first = found(JOB, files[0], HOSTNAME="set-workers-0-2")
    assert (first.node_rank, first.master_addr) == (2, "set-workers-0-0.set.ns.svc.cluster.local")
    second = found(JOB, files[1], HOSTNAME="set-workers-1-2")
    assert (second.node_rank, second.master_addr) == (-1, "")


def test_sagemakers_file_says_the_same_as_its_variables():
    text = '{"current_host": "algo-2", "hosts": ["algo-1", "algo-2"], "network_interface_name": "eth0"}'
    site = found({}, {"/opt/ml/input/config/resourceconfig.json": text})
    assert (site.engine, site.nnodes, site.node_rank, site.master_addr) == ("sagemaker", 2, 1, "algo-1")


CONTRADICTIONS = [
    (SRUN | {"SLURM_NODEID": "3"}, "SLURM_NODEID=3, but SLURM_STEP_NUM_NODES=3: they contradict each other"),
    (SRUN | {"SLURM_STEP_NUM_NODES": "4"}, "SLURM_STEP_NUM_NODES=4, but SLURM_STEP_NODELIST=node[2-4] names 3 hosts"),
    (SRUN | {"SLURM_NODEID": "x"}, "SLURM_NODEID=x: expected a whole number of at least 0"),
    (SRUN | {"SLURM_STEP_NODELIST": "node[2-"}, "SLURM_STEP_NODELIST: column 5, [2-: missing ] after this ["),
    (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "1(y3)"}, "SLURM_STEP_TASKS_PER_NODE: column 1, 1(y3): expected numbers"),
    (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "1,1,2", "SLURM_LOCALID": "2"}, "SLURM_LOCALID=2, but SLURM_STEP_TASKS"),
    (SRUN | {"SLURM_STEP_NUM_TASKS": "2"}, "SLURM_PROCID=2, but SLURM_STEP_NUM_TASKS=2"),
    (HET | {"SLURM_HET_SIZE": "3"}, "SLURM_HET_SIZE=3, but SLURM_JOB_NODELIST_HET_GROUP_2 is not set; use --engine"),
    (HET | {"SLURM_HET_SIZE": "x"}, "SLURM_HET_SIZE=x: expected a whole number of at least 1"),
    (HET | {"SLURM_HET_SIZE": "999999999"}, "SLURM_HET_SIZE=999999999, but SLURM_JOB_NODELIST_HET_GROUP_2 is"),
    (
        HET | {"SLURM_JOB_NODELIST_HET_GROUP_0": "node2"},
        "SLURM_JOB_NODELIST_HET_GROUP_0=node2, SLURM_JOB_NODELIST_HET_GROUP_1=node[1-2]: node2 is in two components",
    ),
    (HET_STEP | {"SLURM_NODEID": "1"}, "SLURM_STEP_NODELIST=node[1-3], SLURM_NODEID=1, but SLURM_JOB_NODELIST_HET_"),
    (HET_STEP | {"SLURM_STEP_NODELIST": "node[2-4]"}, "SLURM_STEP_NODELIST=node[2-4], SLURM_NODEID=0, but SLURM_"),
    (OPENMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, "OMPI_COMM_WORLD_SIZE=4 processes, OMPI_COMM_WORLD_LOCAL"),
    (OPENMPI | {"OMPI_COMM_WORLD_RANK": "4"}, "OMPI_COMM_WORLD_RANK=4, but OMPI_COMM_WORLD_SIZE=4"),
    (HYDRA | {"MPI_LOCALNRANKS": "many"}, "MPI_LOCALNRANKS=many: expected a whole number of at least 1"),
    (FLUX | {"FLUX_JOB_SIZE": "5"}, "FLUX_JOB_SIZE=5 tasks, FLUX_JOB_NNODES=2"),
    (LSF | {"LSB_MCPU_HOSTS": "a 4 b"}, "LSB_MCPU_HOSTS=a 4 b: expected hosts, each with a number of slots"),
    ({"PE_HOSTFILE": "/none", "JOB_ID": "5"}, "PE_HOSTFILE=/none: no host in it, or it cannot be read"),
    ({"PE_HOSTFILE": "/nodes", "JOB_ID": "5"}, "/nodes: n1: expected a host and its slots"),
    ({"SM_HOSTS": "algo-1", "SM_CURRENT_HOST": "algo-1"}, "SM_HOSTS=algo-1: expected JSON"),
    ({"SM_HOSTS": '["a"]', "SM_CURRENT_HOST": "b"}, "SM_HOSTS: expected b in this list"),
    (LWS | {"LWS_WORKER_INDEX": "4"}, "LWS_WORKER_INDEX=4, but LWS_GROUP_SIZE=4"),
]  # fmt: skip


@pytest.mark.parametrize(("environ", "message"), CONTRADICTIONS, ids=[message[:40] for _, message in CONTRADICTIONS])
def test_what_contradicts_itself_is_an_error_that_shows_both(environ, message):
    with pytest.raises(UsageError) as caught:
        found(environ)
    assert message in str(caught.value)
    assert str(caught.value).isprintable()


KNOWN = sorted({name for environ, _ in VECTORS.values() for name in environ} | {"SLURM_STEPID", "NHOSTS"})
VALUES = sorted({value for environ, _ in VECTORS.values() for value in environ.values()})
surroundings = st.dictionaries(
    st.sampled_from(KNOWN), st.sampled_from(VALUES) | st.text() | st.integers(-1, 9).map(str), max_size=25
)


@given(
    surroundings | st.sampled_from([e for e, _ in VECTORS.values()]).flatmap(lambda e: surroundings.map(e.__or__)),
    st.text(),
)
def test_no_environment_does_more_than_be_refused(environ, text):
    """Whatever is in the variables, and in every file that they may name."""
    for read in (reader(FILES), lambda path: text):
        said = ""
        try:
            site = detect(environ, read)
        except UsageError as error:
            said = str(error)
        else:
            assert site is None or isinstance(site, ClusterEnvironment)
            assert site is None or (site.node_rank < site.nnodes or not site.nnodes)
        assert said == "" or said.isprintable()


def mpi_world(counts, *, is_cyclic=False, is_openmpi=False):
    """What mpirun says to each process of such a world, in the order of their ranks; the local size of each."""
    places = [(node, local) for node, count in enumerate(counts) for local in range(count)]
    places.sort(key=(lambda place: place[::-1]) if is_cyclic else None)
    for rank, (node, local) in enumerate(places):
        values = {"RANK": rank, "SIZE": len(places), "LOCAL_RANK": local, "LOCAL_SIZE": counts[node]}
        prefix = "OMPI_COMM_WORLD_" if is_openmpi else "MV2_COMM_WORLD_"
        nodes = {"OMPI_MCA_orte_num_nodes": str(len(counts))} if is_openmpi else {}
        yield nodes | {prefix + name: str(value) for name, value in values.items()}


@pytest.mark.parametrize("is_cyclic", [False, True], ids=["block", "cyclic"])
@pytest.mark.parametrize("is_openmpi", [False, True], ids=["hydra", "openmpi"])
@pytest.mark.parametrize("counts", [(2, 2), (4, 4, 4), (3,)])
def test_an_even_world_of_mpi_is_taken_however_its_ranks_lie(counts, is_openmpi, is_cyclic):
    for environ in mpi_world(counts, is_cyclic=is_cyclic, is_openmpi=is_openmpi):
        assert found(environ).nnodes == len(counts)


@pytest.mark.parametrize(
    ("counts", "is_openmpi"), [((1, 2, 3), False), ((1, 2, 3), True), ((1, 1, 2), True), ((2, 1, 1), True)]
)
def test_a_world_of_mpi_whose_size_every_local_size_divides_is_refused_all_the_same(counts, is_openmpi):
    refused = 0
    for environ in mpi_world(counts, is_openmpi=is_openmpi):
        try:
            found(environ)
        except UsageError as error:
            refused += "infini-run --engine=mpi --hosts=a:4,b:8" in str(error)
    assert refused  # mpirun ends the others


# ---- ports, and what is not handed on


@given(st.from_regex(r"[0-9]{1,25}(\.head)?|[a-zƒ]{1,8}", fullmatch=True), st.integers(0, 2**31 - 1))
def test_a_derived_port_is_below_those_that_the_kernel_gives_out(job, step):
    assert 29500 <= derived_port(job, step) == derived_port(job, step) < 32768


def test_neighbouring_jobs_and_steps_have_ports_of_their_own():
    assert len({derived_port(str(job)) for job in range(1000, 1000 + 3200)}) == 3200
    assert len({derived_port("1000", step) for step in range(32)}) == 32


def test_what_an_mpi_launcher_said_to_us_alone_goes_and_the_rest_stays():
    environ = (
        OPENMPI | HYDRA | SRUN | {"HYDI_CONTROL_FD": "7", "PATH": "/bin", "OMPI_MCA_btl": "tcp", "MPI_HOME": "/m"}
    )
    kept = without_launcher_variables(environ, ("OMPI_MCA_btl",))
    assert kept == SRUN | {"PATH": "/bin", "OMPI_MCA_btl": "tcp", "MPI_HOME": "/m"}


STEP = {"SLURM_STEP_ID": "0", "SLURM_CPUS_ON_NODE": "64"}


@pytest.mark.parametrize(
    ("environ", "cpus", "online", "text"),
    [
        (STEP, 1, 64, "srun binds this process to 1 CPU of 64 in its step; add --cpu-bind=none to srun"),
        (STEP, 2, 8, "srun binds this process to 2 CPUs of 8 in its step; add --cpu-bind=none to srun"),
        (STEP, 64, 64, ""),
        (STEP, 8, 8, ""),  # Slurm counts more than the machine has
        ({**STEP, "SLURM_CPUS_ON_NODE": "4"}, 4, 64, ""),
        ({**STEP, "SLURM_STEP_ID": "4294967291"}, 1, 64, ""),  # a batch script
        ({"SLURM_CPUS_ON_NODE": "64"}, 1, 64, ""),
        ({"SLURM_STEP_ID": "0"}, 1, 64, ""),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2"}, 1, 64, ""),
        ({**STEP, "SLURM_CPUS_ON_NODE": "6x"}, 1, 64, ""),
        ({**STEP, "SLURM_CPUS_ON_NODE": "9" * 5000}, 1, 64, ""),
    ],
)
def test_binding_of_srun_is_explained(environ, cpus, online, text):
    assert explain_binding(environ, cpus, online) == text
