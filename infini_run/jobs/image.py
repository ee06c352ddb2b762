"""Containers: what starts a command in an image, one pure function for each runtime.

The one rule: nothing but the words of a command line comes out of here; nothing is run, pulled or looked for.
"""

from __future__ import annotations

from infini_run.record import record

RUNTIMES = ("apptainer", "singularity", "podman", "enroot", "pyxis")


@record
class Image:
    """A container that wraps what runs on a node. name: the image as its runtime takes it. runtime: one of RUNTIMES.

    binds: `HOST[:THERE[:ro]]`, each on top of the job's directory and working directory, which are bound where they
    are. options: for the runtime, before the image.
    """

    name: str
    runtime: str = ""
    binds: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
