"""The check of a node (--node_check) under an agent, which waits for it beside its Link."""

from __future__ import annotations

from infini_run.multinode.link import protocol
from infini_run.multinode.link.protocol import pack_json
from infini_run.node.node_check import NodeCheck
from infini_run.system.poller import READ

TYPE_CHECKING = False
if TYPE_CHECKING:
    from infini_run.multinode.agent.agent_setup import NodeSetup
    from infini_run.multinode.agent.agent_signals import AgentSignals
    from infini_run.multinode.agent.head_link import HeadLink
    from infini_run.system.poller import Poller


class AgentCheck:
    """One check that runs. It sends its end to the head.

    Args:
        setup: What stays the same over all attempts on this node.
        link: The Link.
        poller: It waits for the check.
        signals: Those of this process; they reap what the check leaves.

    Attributes:
        is_running: Whether the check has not ended.
    """

    def __init__(self, setup: NodeSetup, *, link: HeadLink, poller: Poller, signals: AgentSignals) -> None:
        options = setup.options
        self._link = link
        self._poller = poller
        self._signals = signals
        self._check = NodeCheck(
            options.node_check,
            environ=setup.check_environ,
            cwd=setup.cwd,
            timeout_s=options.node_check_timeout_s,
            gpus=setup.gpus,
            log_dir=setup.log_dir,
            entry=signals.entry,
        )
        self.is_running = True

    def start(self) -> None:
        """Start it. One that cannot start is complete, with the reason."""
        self._check.start()
        self.go_on()

    def go_on(self) -> None:
        """Do what is due, and tell the poller what to wait for next."""
        check = self._check
        if not self.is_running or self._link.is_lost:
            return
        if not check.ended:
            self._poller.unwatch(check.fileno())  # at its end the descriptor is closed
        if check.poll(0):
            self.is_running, self._link.due_s = False, float("inf")
            self._signals.reap_orphans()
            self._link.connection.send(pack_json(protocol.CHECKED, {"reason": check.reason}))
        else:
            self._poller.watch(check.fileno(), READ, self.go_on)
            self._link.due_s = check.due_s

    def close(self) -> None:
        """Kill what is left of it. Safe twice."""
        self._check.close()
