"""Containers: the command line of each runtime, word by word; podman really runs, where it can."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from infini_run.errors import UsageError
from infini_run.jobs.request.container import Image, Place, problems, srun_options, wrap
from tests.support.podman import IMAGE, binds, limits

PLACE = Place(folder="/jobs/ir-1", cwd="/home/me/my work", slot_type="cuda")
BOUND = ("--bind=/jobs/ir-1", "--bind=/home/me/my work")
PODMAN = ("podman run --rm --network=host --ipc=host --cgroups=disabled --ulimit=host --security-opt=label=disable "
          "--workdir=/home/me/my\0work --env=SLURM_* --env=SLURMD_NODENAME --env=PBS_* --env=INFINI_* "
          "--env=CUDA_VISIBLE_DEVICES --env=NVIDIA_VISIBLE_DEVICES --env=ROCR_VISIBLE_DEVICES "
          "--env=HIP_VISIBLE_DEVICES "
          "--env=ASCEND_RT_VISIBLE_DEVICES").replace(" ", "\n").replace("\0", " ").split("\n")  # fmt: skip
VOLUMES = ("--volume=/jobs/ir-1:/jobs/ir-1", "--volume=/home/me/my work:/home/me/my work")
MOUNTS = ("--mount=/jobs/ir-1:/jobs/ir-1", "--mount=/home/me/my work:/home/me/my work")
CD = ("sh", "-c", 'cd "$0" && exec "$@"', "/home/me/my work")

GOLDEN = [
    (Image(name="pytorch/pytorch:2.4", runtime="apptainer"), "cuda",
     ["apptainer", "exec", "--writable-tmpfs", "--pwd=/home/me/my work", "--no-eval", "--nv", *BOUND,
      "docker://pytorch/pytorch:2.4"]),
    (Image(name="/images/a.sif", runtime="singularity", binds=("/data:/data:ro",), options=("--contain",)), "rocm",
     ["singularity", "exec", "--writable-tmpfs", "--pwd=/home/me/my work", "--rocm", *BOUND, "--bind=/data:/data:ro",
      "--contain", "/images/a.sif"]),
    (Image(name="oras://x/y", runtime="apptainer"), "cpu",
     ["apptainer", "exec", "--writable-tmpfs", "--pwd=/home/me/my work", "--no-eval", *BOUND, "oras://x/y"]),
    (Image(name="a.sif", runtime="apptainer"), "cpu",
     ["apptainer", "exec", "--writable-tmpfs", "--pwd=/home/me/my work", "--no-eval", *BOUND, "a.sif"]),
    (Image(name="docker.io/x/y:1", runtime="podman", binds=("/data", "/a:/b:ro"), options=("--privileged",)), "cuda",
     [*PODMAN, "--device=nvidia.com/gpu=all", *VOLUMES, "--volume=/data:/data", "--volume=/a:/b:ro", "--privileged",
      "docker.io/x/y:1"]),
    (Image(name="x", runtime="podman"), "rocm",
     [*PODMAN, "--device=/dev/kfd", "--device=/dev/dri", "--group-add=keep-groups", *VOLUMES, "x"]),
    (Image(name="x", runtime="podman"), "cpu", [*PODMAN, *VOLUMES, "x"]),
    (Image(name="nvcr.io/nvidia/pytorch:24.01", runtime="enroot", binds=("/a:/b:ro", "/data")), "cuda",
     ["enroot", "start", "--rw", *MOUNTS, "--mount=/a:/b:none:x-create=auto,bind,ro", "--mount=/data:/data",
      "--env=NVIDIA_VISIBLE_DEVICES=all", "--env=NVIDIA_DRIVER_CAPABILITIES=compute,utility",
      "nvcr.io+nvidia+pytorch+24.01", *CD]),
    (Image(name="/images/a.sqsh", runtime="enroot", options=("--root",)), "rocm",
     ["enroot", "start", "--rw", *MOUNTS, "--mount=/dev/kfd:/dev/kfd", "--mount=/dev/dri:/dev/dri", "--root",
      "/images/a.sqsh", *CD]),
]  # fmt: skip


@pytest.mark.parametrize(("image", "slot_type", "wanted"), GOLDEN, ids=[f"{i.runtime}-{t}" for i, t, _ in GOLDEN])
def test_a_runtime_gets_these_words(image, slot_type, wanted):
    place = Place(folder=PLACE.folder, cwd=PLACE.cwd, slot_type=slot_type)
    assert problems(image, place) == []
    assert wrap(image, place, ["python3", "-c", "print('a b')", "$HOME"]) == [
        *wanted, "python3", "-c", "print('a b')", "$HOME",
    ]  # fmt: skip


def test_a_link_goes_past_podman():
    argv = wrap(Image(name="x", runtime="podman"), Place(folder="/f", cwd="/f", over_stdio=True), ["python3"])
    assert argv[:6] == ["sh", "-c", 'exec "$@" 3<&0 4>&1', "sh", "podman", "run"]
    assert "--preserve-fds=2" in argv
    assert argv[-6:] == ["x", "sh", "-c", 'exec "$@" <&3 >&4 3<&- 4>&-', "sh", "python3"]


PYXIS = [
    ("nvcr.io/nvidia/pytorch:24.01", "nvcr.io#nvidia/pytorch:24.01"),
    ("ubuntu:22.04", "ubuntu:22.04"),
    ("library/ubuntu", "library/ubuntu"),
    ("localhost:5000/x", "localhost:5000#x"),
    ("nvcr.io#nvidia/pytorch", "nvcr.io#nvidia/pytorch"),
    ("docker://nvcr.io#nvidia/x", "docker://nvcr.io#nvidia/x"),
    ("/images/a.sqsh", "/images/a.sqsh"),
    ("./a.sqsh", "./a.sqsh"),
]


@pytest.mark.parametrize(("name", "wanted"), PYXIS)
def test_pyxis_is_options_of_srun(name, wanted):
    image = Image(name=name, runtime="pyxis", binds=("/data", "/a:/b:ro"), options=("--no-container-entrypoint",))
    assert srun_options(image, PLACE) == [
        f"--container-image={wanted}",
        "--container-mounts=/jobs/ir-1:/jobs/ir-1,/home/me/my work:/home/me/my work,/data:/data,/a:/b:ro",
        "--container-workdir=/home/me/my work",
        "--container-writable",
        "--no-container-entrypoint",
    ]


def test_pyxis_alone_starts_nothing():
    with pytest.raises(UsageError, match="--runtime=pyxis: needs srun"):
        wrap(Image(name="x", runtime="pyxis"), PLACE, ["true"])


def test_pyxis_passes_the_gpus_of_amd():
    place = Place(folder="/f", cwd="/f", slot_type="rocm")
    mounts = srun_options(Image(name="x", runtime="pyxis"), place)[1]
    assert mounts == "--container-mounts=/f:/f,/dev/kfd:/dev/kfd,/dev/dri:/dev/dri"


WRONG = [
    (
        Image(name="x", runtime="docker"),
        "--runtime=docker: expected apptainer, singularity, podman, enroot, or pyxis",
    ),
    (Image(name="", runtime="podman"), "--container='': expected the name or path of an image"),
    (
        Image(name="--privileged", runtime="podman"),
        "--container='--privileged': expected the name or path of an image",
    ),
    (
        Image(name="x", runtime="podman", binds=("/a:/b:xx",)),
        "--bind=/a:/b:xx: expected HOST, HOST:THERE, or HOST:THERE:ro",
    ),
    (
        Image(name="x", runtime="podman", binds=("/a::ro",)),
        "--bind=/a::ro: expected HOST, HOST:THERE, or HOST:THERE:ro",
    ),
    (Image(name="x", runtime="podman", binds=("/a,b",)), "--bind=/a,b: expected HOST, HOST:THERE, or HOST:THERE:ro"),
]


@pytest.mark.parametrize(("image", "wanted"), WRONG)
def test_what_is_wrong_with_a_container_is_told(image, wanted):
    (line,) = problems(image, PLACE)
    assert line.startswith(wanted)


def test_a_directory_that_cannot_be_bound_is_told():
    assert len(problems(Image(name="x", runtime="podman"), Place(folder="/a:b", cwd="/c,d"))) == 2


@pytest.mark.parametrize("slot_type", ["cpu", "rocm"])  # CDI devices would have to be there
def test_podman_takes_these_words(podman, tmp_path, slot_type):
    place = Place(folder=str(tmp_path), cwd=str(tmp_path), slot_type=slot_type)
    image = Image(name=IMAGE, runtime="podman", binds=(f"{tmp_path}:/there:ro",), options=("--cap-add=SYS_PTRACE",))
    argv = wrap(image, place, ["sh", "-c", "true"])
    if slot_type == "rocm":
        argv = [word.replace("/dev/kfd", "/dev/null").replace("/dev/dri", "/dev/zero") for word in argv]
    name = podman.call("create", *argv[2:]).stdout.strip()
    podman.call("rm", name)


def test_podman_runs_a_command_where_it_should_with_what_it_should_see(podman, tmp_path):
    """A directory that the user binds himself is mounted once; limits that he gives are those of the container."""
    folder, cwd = tmp_path / "job", tmp_path / "my work"
    folder.mkdir()
    cwd.mkdir()
    (folder / "given").write_text("given\n")
    script = 'pwd; echo "$CUDA_VISIBLE_DEVICES $SLURM_NODEID $SECRET"; cat "$0" /etc/image; echo made >made; exit 7'
    image = Image(name=IMAGE, runtime="podman", binds=(*binds(), f"{folder}:{folder}:ro"), options=tuple(limits()))
    argv = wrap(image, Place(folder=str(folder), cwd=str(cwd)), ["sh", "-c", script, str(folder / "given")])
    env = {**os.environ, **podman.env, "CUDA_VISIBLE_DEVICES": "2,3", "SLURM_NODEID": "1", "SECRET": "x"}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == (f"{cwd}\n2,3 1 \ngiven\nthe image\n", 7), done.stderr
    assert (cwd / "made").read_text() == "made\n"
    assert podman.containers() == []


def test_the_functions_ask_nobody():
    code = "import sys; import infini_run.jobs.request.container as i; assert 'subprocess' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
