"""The examples that are no Python program: batch scripts run, manifests fit their schemas, a notebook runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.batch import Queue
from tests.support.blocks import blocks
from tests.support.paths import ROOT
from tests.support.waiting import LIMIT_S, until

EXAMPLES = ROOT / "examples"
# kubeflow/training-operator, manifests/base/crds/kubeflow.org_pytorchjobs.yaml
PYTORCHJOB = {"pytorchReplicaSpecs", "nprocPerNode", "elasticPolicy", "runPolicy"}
REPLICA = {"replicas", "restartPolicy", "template"}
SHOWN = {  # the page that shows an example, and the example
    "sbatch.sh": "start/hpc.md",
    "pbs.sh": "start/hpc.md",
    "compose.yaml": "start/containers.md",
    "kubernetes-job.yaml": "start/containers.md",
    "pytorchjob.yaml": "start/containers.md",
    "infini-run.service": "start/workstation.md",
    "prometheus-rules.yaml": "monitoring.md",
}
TRAIN = "import os, sys\nsys.stdout.write(f\"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}\\n\")\n"


@pytest.mark.parametrize("name", SHOWN)
def test_a_page_shows_the_example_as_it_is(name):
    texts = [block.text for block in blocks(ROOT / "docs" / SHOWN[name])]
    assert (EXAMPLES / name).read_text() in texts


@pytest.mark.parametrize(("kind", "command", "script"), [("slurm", "sbatch", "sbatch.sh"), ("pbs", "qsub", "pbs.sh")])
def test_a_batch_script_runs_its_ranks_on_all_nodes(kind, command, script, tmp_path, case):
    """~/.venv/run is the environment of these tests."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / ".venv/run").mkdir(parents=True)
    (tmp_path / ".venv/run/bin").symlink_to(Path(sys.executable).parent)
    output = [f"--output={tmp_path}/out"] if kind == "slurm" else ["-o", str(tmp_path / "out")]
    words = [command, *output, EXAMPLES / script]
    queue = Queue(kind)
    try:
        path = f"{Path(sys.executable).parent}:{queue.env['PATH']}"
        env = queue.env | case.env | {"PATH": path, "HOME": str(tmp_path), "INFINI_RUN_NODE_TIMEOUT": "60"}
        made = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert made.returncode == 0, made.stderr
        queue.ended()
        [job] = queue.jobs()
    finally:
        queue.close()
    output = (tmp_path / "out").read_text()
    assert (job["state"], job["code"]) == ("COMPLETED", 0), output
    said = sorted(line.partition("] ")[2] for line in output.splitlines())
    assert said == sorted(f"rank {rank} of 32" for rank in range(32)), output
    until(lambda: not case.alive(), LIMIT_S)


def documents(name):
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all((EXAMPLES / name).read_text()))


def validate(document):
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def test_the_indexed_job_fits_the_schema_of_kubernetes():
    kinds = []
    for document in documents("kubernetes-job.yaml"):
        validate(document)
        kinds.append(document["kind"])
    assert kinds == ["Service", "Job"]


def test_a_manifest_with_a_misspelt_field_does_not_fit():
    service, _ = documents("kubernetes-job.yaml")
    service["spec"]["clusterIp"] = "None"
    with pytest.raises(Exception, match="clusterIp"):
        validate(service)


def test_the_pytorchjob_has_the_fields_of_its_definition():
    [job] = documents("pytorchjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert set(job["spec"]) <= PYTORCHJOB
    for replica in job["spec"]["pytorchReplicaSpecs"].values():
        assert set(replica) <= REPLICA
        spec = replica["template"]["spec"] | {"restartPolicy": replica["restartPolicy"]}
        validate({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec})
        assert [each["name"] for each in spec["containers"]] == ["pytorch"]  # which the operator looks for


def test_what_the_operator_sets_is_read(tmp_path):
    """training-operator, pkg/controller.v1/pytorch/envvar.go: worker 1 of the example."""
    (tmp_path / "train.py").write_text(TRAIN)
    [job] = documents("pytorchjob.yaml")
    pods = sum(replica["replicas"] for replica in job["spec"]["pytorchReplicaSpecs"].values())
    env = {
        **os.environ,
        "PET_NNODES": str(pods), "PET_NPROC_PER_NODE": job["spec"]["nprocPerNode"], "PET_NODE_RANK": "2",
        "PET_MASTER_ADDR": "train-master-0", "PET_MASTER_PORT": "23456", "INFINI_RUN_TOKEN": "0123456789abcdef",
    }  # fmt: skip
    args = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["args"]
    done = subprocess.run(
        [Path(sys.executable).parent / "infini-run", "--dry_run=json", *args],
        cwd=tmp_path, env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert (plan["world_size"], plan["nnodes"], plan["master_addr"]) == (32, 4, "train-master-0")
    assert [rank["rank"] for rank in plan["ranks"]] == list(range(16, 24))


def test_the_compose_file_gives_the_time_that_a_stop_takes():
    """https://github.com/compose-spec/compose-spec/blob/main/05-services.md has these names."""
    [compose] = documents("compose.yaml")
    [service] = compose["services"].values()
    assert set(service) <= {"image", "init", "stop_grace_period", "environment", "command", "shm_size"}
    grace_s = int(service["environment"]["INFINI_RUN_GRACE"].rstrip("s"))
    assert int(service["stop_grace_period"].rstrip("s")) >= grace_s + 5  # up to 2 s of it for what ranks left behind
    assert service["init"] is False


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_has_nothing_to_say_against_the_unit(tmp_path):
    text = (EXAMPLES / "infini-run.service").read_text().replace("/srv/training", str(tmp_path))
    (tmp_path / "training.service").write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", tmp_path / "training.service"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert [line for line in (done.stdout + done.stderr).splitlines() if "training.service" in line] == []


def test_the_notebook_runs(tmp_path):
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    run = f"import sys, nbformat, nbclient\nsys.path.insert(0, {str(ROOT)!r})\n"
    run += "from tests.support.kernel_ports import client_config\n"
    run += "book = nbformat.read(sys.argv[1], 4)\n"
    run += f"given = {{'timeout': {LIMIT_S}, 'kernel_name': 'python3', 'config': client_config()}}\n"
    run += "nbclient.NotebookClient(book, **given).execute()\n"
    run += "nbformat.write(book, 'done.ipynb')\n"
    env = os.environ | {"JUPYTER_PLATFORM_DIRS": "1", "HOME": str(tmp_path), "IPYTHONDIR": str(tmp_path)}
    env.pop("PYTEST_CURRENT_TEST")  # with it, a kernel leaves descriptors 1 and 2 alone
    done = subprocess.run(
        [sys.executable, "-c", run, EXAMPLES / "notebook.ipynb"],
        cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=LIMIT_S * 2,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    book = json.loads((tmp_path / "done.ipynb").read_text())
    outputs = [output for cell in book["cells"] for output in cell.get("outputs", ())]
    shown = ["".join(output.get("text", output.get("data", {}).get("text/plain", ""))) for output in outputs]
    text = "\n".join(shown)
    assert "[0.0, 0.5]" in text
    assert "rank 1 of 2" in text
    assert "loss is nan on rank 0" in text
    assert "1.0" in text
