"""Containers: what starts a command in an image, one pure function for each runtime.

The one rule: only the words of a command line come out of here. Nothing runs, pulls, or looks for anything. The job's
directory and the working directory are where they are outside; network and /dev/shm are the node's, so that ranks of
all nodes meet. Of two options the user's wins: it is last.
"""

from __future__ import annotations

import os

from infini_run.errors import UsageError
from infini_run.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

RUNTIMES = ("apptainer", "singularity", "podman", "enroot", "pyxis")
# what podman is to take from the node; the others inherit all of it
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_INHERITED = ("SLURM_*", "SLURMD_NODENAME", "PBS_*", "INFINI_*", *_VISIBLE, "ASCEND_RT_VISIBLE_DEVICES")
_PAST, _BACK = 'exec "$@" 3<&0 4>&1', 'exec "$@" <&3 >&4 3<&- 4>&-'
_ROCM = ("/dev/kfd", "/dev/dri")
_NVIDIA = ("NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=compute,utility")  # what enroot's hook goes by


@record
class Image:
    """A container that wraps what runs on a node.

    Args:
        name: the image as its runtime takes it.
        runtime: one of RUNTIMES.
        python: its interpreter, which has infini-run.
        binds: `HOST[:THERE[:ro]]`, each on top of the job's directory and working directory, which keep their paths.
        options: for the runtime, before the image.
    """

    name: str
    runtime: str = ""
    binds: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    python: str = "python3"


@record
class Place:
    """Where a container runs.

    Args:
        folder: the job's directory.
        cwd: the working directory.
        slot_type: the kind of GPUs that it sees; cpu: none.
        over_stdio: its stdin and stdout are the link to the launcher (this machine); else it connects to the
            launcher.
    """

    folder: str
    cwd: str
    slot_type: str = "cpu"
    over_stdio: bool = False

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.folder, self.cwd)))

    def beside(self, binds: Sequence[str]) -> tuple[str, ...]:
        """Return the directories that no bind of the user's covers: podman rejects two mounts at one place."""
        taken = [os.path.normpath(bind.split(":")[:2][-1]) for bind in binds]
        return tuple(path for path in self.paths if path not in taken)


def problems(image: Image, place: Place) -> list[str]:
    """Return what is wrong with it, one line each."""
    found = []
    if image.runtime not in RUNTIMES:
        found.append(f"--runtime={image.runtime}: expected {', '.join(RUNTIMES[:-1])}, or {RUNTIMES[-1]}")
    if not image.name or image.name.startswith("-") or not image.name.isprintable():
        found.append(f"--container={image.name!r}: expected the name or path of an image")
    for bind in image.binds:
        parts = bind.split(":")
        if not 1 <= len(parts) <= 3 or not all(parts) or parts[2:] not in ([], ["ro"], ["rw"]) or "," in bind:
            found.append(f"--bind={bind}: expected HOST, HOST:THERE, or HOST:THERE:ro")
    for path in place.paths:
        if ":" in path or "," in path:
            found.append(f"{path}: cannot bind a directory with : or , in its name into a container")
    return found


def wrap(image: Image, place: Place, command: Sequence[str]) -> list[str]:
    """Return the command line that runs `command` in a container. Raises UsageError for pyxis, which is srun's
    business: `srun_options`."""
    if image.runtime == "pyxis":
        raise UsageError("--runtime=pyxis: needs srun of Slurm; use --runtime=apptainer, podman, or enroot")
    runtimes: dict[str, Callable[[Image, Place, Sequence[str]], list[str]]] = {
        "apptainer": apptainer, "singularity": apptainer, "podman": podman, "enroot": enroot,
    }  # fmt: skip
    return runtimes[image.runtime](image, place, command)


def apptainer(image: Image, place: Place, command: Sequence[str]) -> list[str]:
    """Return the command line of Apptainer, or of Singularity, which it forked. It inherits the environment;
    --no-eval (Apptainer 1.1) keeps it from evaluating what is in there."""
    words = [image.runtime, "exec", "--writable-tmpfs", f"--pwd={place.cwd}"]
    if image.runtime == "apptainer":
        words.append("--no-eval")
    words += {"cuda": ["--nv"], "rocm": ["--rocm"]}.get(place.slot_type, [])
    words += [f"--bind={bind}" for bind in (*place.beside(image.binds), *image.binds)]
    is_named = (
        "://" in image.name or image.name.startswith(("/", "./", "../")) or image.name.endswith((".sif", ".img"))
    )
    return [*words, *image.options, image.name if is_named else f"docker://{image.name}", *command]


def podman(image: Image, place: Place, command: Sequence[str]) -> list[str]:
    """Return the command line of Podman, without root too, with GPUs by CDI. It stays in the job's cgroup (crun),
    else it would outlive the job. That takes a PID namespace, in which all ends with the command. A link goes past
    podman and conmon, which would close, copy, and log it. Without a link they have stdin and stdout, for as long as
    they live."""
    words = ["podman", "run", "--rm", "--network=host", "--ipc=host", "--cgroups=disabled"]
    if place.over_stdio:
        words = ["sh", "-c", _PAST, "sh", *words, "--preserve-fds=2"]
        command = ["sh", "-c", _BACK, "sh", *command]
    if not any(option.startswith("--ulimit") for option in image.options):  # beside host it takes no other (4.3)
        words.append("--ulimit=host")
    words += ["--security-opt=label=disable", f"--workdir={place.cwd}"]
    words += [f"--env={name}" for name in _INHERITED]
    if place.slot_type == "cuda":
        words.append("--device=nvidia.com/gpu=all")
    elif place.slot_type == "rocm":
        words += [*(f"--device={path}" for path in _ROCM), "--group-add=keep-groups"]
    words += [f"--volume={path}:{path}" for path in place.beside(image.binds)]
    words += [f"--volume={bind if ':' in bind else f'{bind}:{bind}'}" for bind in image.binds]
    return [*words, *image.options, image.name, *command]


def enroot(image: Image, place: Place, command: Sequence[str]) -> list[str]:
    """Return the command line of Enroot, in a container from `enroot create`, or a .sqsh file. It has no option for
    the directory."""
    words = ["enroot", "start", "--rw"]
    words += [f"--mount={path}:{path}" for path in place.beside(image.binds)]
    words += [f"--mount={_fstab(bind)}" for bind in image.binds]
    if place.slot_type == "cuda":
        words += [f"--env={text}" for text in _NVIDIA]
    elif place.slot_type == "rocm":
        words += [f"--mount={path}:{path}" for path in _ROCM]
    is_file = image.name.endswith((".sqsh", ".squashfs"))
    name = image.name if is_file else image.name.replace("/", "+").replace(":", "+")
    return [*words, *image.options, name, "sh", "-c", 'cd "$0" && exec "$@"', place.cwd, *command]


def srun_options(image: Image, place: Place) -> list[str]:
    """Return the options of srun that make Pyxis run its tasks in the container. Its registries end in #."""
    registry, slash, path = image.name.partition("/")
    is_registry = slash and ("." in registry or ":" in registry) and registry.strip(".")
    name = f"{registry}#{path}" if is_registry and "://" not in image.name and "#" not in image.name else image.name
    mounts = [f"{path}:{path}" for path in place.beside(image.binds)]
    mounts += [bind if ":" in bind else f"{bind}:{bind}" for bind in image.binds]
    if place.slot_type == "rocm":
        mounts += [f"{path}:{path}" for path in _ROCM]
    words = [
        f"--container-image={name}",
        f"--container-mounts={','.join(mounts)}",
        f"--container-workdir={place.cwd}",
    ]
    return [*words, "--container-writable", *image.options]


def _fstab(bind: str) -> str:
    """Return a mount for enroot. Its options come after a second colon, and it needs an explicit `bind`."""
    host, _, rest = bind.partition(":")
    there, _, mode = (rest or host).partition(":")
    return f"{host}:{there}" + (f":none:x-create=auto,bind,{mode}" if mode else "")
