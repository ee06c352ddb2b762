"""SageMaker's training containers: SM_HOSTS and SM_CURRENT_HOST, or the file that they are made from.

(github.com/aws/sagemaker-training-toolkit, ENVIRONMENT_VARIABLES.md). All hosts sort them alike.
"""

from __future__ import annotations

from infini_run.environments.environment import ClusterEnvironment, Variables
from infini_run.environments.hostlist import Host, quoted
from infini_run.errors import UsageError

FILE = "/opt/ml/input/config/resourceconfig.json"


def detect(around: Variables) -> ClusterEnvironment | None:
    """Return the facts of a host of a SageMaker training job; None: this process is none."""
    if around.has("SM_HOSTS", "SM_CURRENT_HOST"):
        return _site(around, _loaded(around.text("SM_HOSTS"), "SM_HOSTS"), around.text("SM_CURRENT_HOST"), "SM_HOSTS")
    text = around.file(FILE)
    if not text:
        return None
    content = _loaded(text, FILE)
    if not isinstance(content, dict):
        content = {}
    return _site(around, content.get("hosts"), content.get("current_host"), FILE)


def _site(around: Variables, names: object, current: object, origin: str) -> ClusterEnvironment:
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in [*names, current]):
        raise UsageError(f"{origin}: expected a list of hosts, and which of them is this one")
    if current not in names or len(set(names)) != len(names):
        raise UsageError(f"{origin}: expected {quoted(str(current))} in this list, and every host once")
    hosts = tuple(Host(name=name) for name in sorted(names))
    node_rank = (sorted(names).index(current), origin)
    return around.cluster("sagemaker", hosts=(hosts, origin), node_rank=node_rank, gpus=around.fact("SM_NUM_GPUS"))


def _loaded(text: str, origin: str) -> object:
    try:
        import json

        return json.loads(text)
    except (ValueError, RecursionError):
        raise UsageError(f"{origin}={quoted(text)}: expected JSON") from None
