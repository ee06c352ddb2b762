"""The process of --preload under an agent: it imports while other nodes connect, and stays from one attempt to the
next. The agent waits for it beside its link, so that the head's words and the lease are never late for it."""

from __future__ import annotations

import time

from infini_run.errors import InfiniRunError
from infini_run.multinode.agent.agent_setup import make_node_plan
from infini_run.node.warm_zygote import WarmZygote
from infini_run.system.poller import READ

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from infini_run.core.c_structs import ProcessState
    from infini_run.multinode.agent.agent_setup import NodeSetup
    from infini_run.multinode.agent.head_link import HeadLink
    from infini_run.plan.model import Plan
    from infini_run.system.poller import Poller


class AgentPreload:
    """What all attempts of this node fork their ranks from. The imports begin at once.

    Attributes:
        zygote: The process.

    Args:
        setup: What stays the same over all attempts on this node.
        launch_id: Of the launch.
        entry: The state of this process at its start.
        poller: It waits for the process.
        print_line: Gets a line for the user.
        on_refusal: Called if a module cannot be imported while no attempt waits for it.
    """

    def __init__(
        self,
        setup: NodeSetup,
        launch_id: str,
        *,
        entry: ProcessState,
        poller: Poller,
        print_line: Callable[[str], None],
        on_refusal: Callable[[InfiniRunError], None],
    ) -> None:
        self.zygote = WarmZygote(
            _first_plan(setup, launch_id),
            setup.options,
            environ=setup.environ,
            entry=entry,
            print_line=print_line,
            host=setup.host,
            cwd=setup.cwd,
        )
        self._poller = poller
        self._on_refusal = on_refusal
        self._fds: list[int] = []
        self._error: InfiniRunError | None = None
        self._is_first, self._is_awaited = True, False
        self.zygote.start()
        self._watch()

    def _watch(self) -> None:
        self._fds = self.zygote.fds()
        for fd in self._fds:
            self._poller.watch(fd, READ, self._go_on)

    def _unwatch(self) -> None:
        """Stop watching, before the process is given up and its descriptors close."""
        while self._fds:
            self._poller.unwatch(self._fds.pop())

    def _go_on(self) -> None:
        self._unwatch()
        try:
            self.zygote.go_on()
        except InfiniRunError as error:
            self.zygote.close()
            self._error = error
            if not self._is_awaited:
                self._on_refusal(error)
        else:
            self._watch()

    def prepare(self, plan: Plan, lived_s: float | None, link: HeadLink, is_over: Callable[[], bool]) -> bool:
        """Wait until the ranks of the next attempt can be forked, or must start cold.

        Args:
            plan: The plan of that attempt.
            lived_s: For how long the last attempt lived after its fork, in seconds. None: it did not fail here.
            link: The Link, which is read meanwhile.
            is_over: Returns whether nobody waits for it any more.

        Returns:
            False: this node has refused before, and the head reports that.

        Raises:
            UsageError, StartError: As WarmZygote.prepare.
        """
        if self._error is not None:
            return False
        self._is_awaited = True
        if not (self._is_first and self.zygote.cold_because):
            self._unwatch()
            self.zygote.renew(lived_s, plan)
            self._watch()
        self._is_first = False
        while self._error is None and not self.zygote.is_settled and not is_over():
            left_s, most_s = max(0.0, self.zygote.due_s - time.monotonic()), link.wait_s()
            link.poll(left_s if most_s is None else min(left_s, most_s))
            if time.monotonic() >= self.zygote.due_s:
                self._go_on()
        if self._error is not None:
            raise self._error
        if not self.zygote.is_settled:
            self._unwatch()
            self.zygote.give_up()
        self._is_awaited = False
        return True

    def close(self) -> None:
        """Kill the process. Safe twice."""
        self._unwatch()
        self.zygote.close()


def _first_plan(setup: NodeSetup, launch_id: str) -> Plan:
    """Return the part of the plan that is known before the other nodes connect."""
    options = setup.options
    launch = {
        "node": 0,
        "nnodes": options.nnodes,
        "nproc": setup.nproc,
        "first": 0,
        "most": setup.nproc,
        "heading": "",
    }
    launch |= {"world_size": setup.nproc * options.nnodes, "host": setup.host, "launch_id": launch_id, "restarts": 0}
    launch |= {"programs": []}
    return make_node_plan(setup, {**launch, "master_addr": options.master_addr, "master_port": 1})[0]
