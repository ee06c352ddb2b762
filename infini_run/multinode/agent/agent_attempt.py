"""One attempt of the ranks of a node, under an agent: start, watch over, end, and report to the head.

The ranks are a NodeLaunch, as for the command. While they run, the agent waits for them and for the head at once.
"""

from __future__ import annotations

import time

import infini_run.lean_os as os
from infini_run.core.group import release_caller_descriptors
from infini_run.errors import LinkError, StartError, printable
from infini_run.multinode.agent.agent_setup import free_ports
from infini_run.multinode.agent.rank_reports import RankReports
from infini_run.multinode.link import protocol
from infini_run.multinode.link.lease import LEAST_LEASE
from infini_run.multinode.link.progress_messages import ProgressSender
from infini_run.multinode.link.protocol import pack_json
from infini_run.node.launch import NodeLaunch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from infini_run.display.relay import ObserverRelay
    from infini_run.multinode.agent.agent_setup import NodeSetup
    from infini_run.multinode.agent.agent_signals import AgentSignals
    from infini_run.multinode.agent.byte_stream import AgentStream
    from infini_run.multinode.agent.head_link import HeadLink
    from infini_run.multinode.agent.rank_orders import RankOrders
    from infini_run.multinode.agent.rank_stdio import RankStdio
    from infini_run.multinode.link.lease import Lease
    from infini_run.node.guard_lease import GuardLease
    from infini_run.node.warm_zygote import WarmZygote
    from infini_run.options.keyword_errors import KeywordErrors
    from infini_run.options.launch_options import Options
    from infini_run.plan.model import Plan
    from infini_run.report.report import Report
    from infini_run.system.poller import Poller


class AgentAttempt:
    """One attempt. It may fail to start.

    Args:
        plan: The plan of this node.
        options: What the user asked for.
        setup: What stays the same over all attempts on this node.
        launch: The head's LAUNCH frame, checked.
        link: The Link.
        poller: It waits for the Link and all that the agent watches.
        stdio: That of the ranks.
        stream: Between the head and the one process that runs here; None: there is none.
        orders: What the head asks of these ranks.
        signals: Those of this process.
        zygote: The ranks are forks of it. None: they are started.
        keywords: Renames flags in messages, for a head in the Python API; None: the command's.
        observe: What the head wants to see of the ranks here.

    Attributes:
        relay: Observes the ranks for the head. None: nobody wants to see them, or they are gone.
        lived_s: Seconds from the ranks' fork to the first failure here. None: none failed, or they are no forks.
    """

    def __init__(
        self,
        plan: Plan,
        options: Options,
        *,
        setup: NodeSetup,
        launch: dict[str, Any],
        link: HeadLink,
        poller: Poller,
        stdio: RankStdio,
        stream: AgentStream | None,
        orders: RankOrders,
        signals: AgentSignals,
        zygote: WarmZygote | None,
        keywords: KeywordErrors | None,
        observe: Sequence[str],
    ) -> None:
        self._plan = plan
        self._options = options
        self._setup = setup
        self._launch = launch
        self._link = link
        self._poller = poller
        self._stdio = stdio
        self._stream = stream
        self._orders = orders
        self._signals = signals
        self._zygote = zygote
        self._keywords = keywords
        self._observe = observe
        self._reports = RankReports(link.connection, stdio, options.again_code)
        self._progress = ProgressSender(
            self._reports.send_progress, lambda: link.connection.has_room, launch["nnodes"]
        )
        self.relay: ObserverRelay | None = None
        self.lived_s: float | None = None

    def run_to_end(self) -> Report:
        """Run the ranks of this node to their end, and send it to the head.

        Returns:
            The report of this node.

        Raises:
            LinkError: The head has gone, or has given this node up.
            StartError: The ranks cannot start.
        """
        for notice in self._plan.nodes[0].notices:
            self._stdio.print_line(f"infini-run: {self._launch['host']}: {printable(notice)}")
        run = self._make_run()
        self._start(run)
        while not run.ended:
            self._run_once(run)
        return self._finish(run)

    # ---- the start

    def _make_run(self) -> NodeLaunch:
        """Return the launch of this node, which reports to the head."""
        lease, stream = self._link.lease, self._stream
        self.relay = self._open_relay()
        given: dict[str, Any] = {
            "environ": self._setup.environ,
            "entry": self._signals.entry_of_ranks(self._options),
            "cwd": self._setup.cwd,
            "print_line": self._stdio.print_line,
            "keywords": self._keywords,
            "head": self._reports,
            "heading": self._launch["heading"],
            "observers": self.relay,
            "lease": None if lease is None else self._guard_lease(lease),
            "stdins": {} if stream is None else {self._plan.workers[0].rank: stream.child_socket.fileno()},
        }
        if self._zygote is None:
            return NodeLaunch(self._plan, self._options, **given)
        from infini_run.node.warm_launch import WarmLaunch

        return WarmLaunch(self._plan, self._options, zygote=self._zygote, **given)

    def _open_relay(self) -> ObserverRelay | None:
        if not self._observe:
            return None
        from infini_run.display.relay import ObserverRelay

        connection = self._link.connection
        return ObserverRelay(
            lambda content: connection.send(pack_json(protocol.OBSERVATIONS, content)),
            lambda: connection.has_room,
            counts="trace" in self._observe,
            signs_s=self._options.metrics_interval_s if "signs" in self._observe else 0.0,
        )

    def _guard_lease(self, lease: Lease) -> GuardLease:
        """Return the lease for the guard, which also reports that the ranks are dead once this process is. The head
        gets the hash of that word before a rank lives."""
        from infini_run.node.guard_lease import GuardLease

        given: dict[str, Any] = {"length_s": lease.length_s, "since_s": lease.since_ns / 1e9}
        connection = self._link.connection
        if connection.write_fd == connection.fileno():  # with two pipes ssh reports it
            from infini_run.multinode.link.last_word import make_last_word

            word, hashed = make_last_word()
            connection.send(hashed)
            given |= {"last_word": word, "link_fd": connection.fileno()}
        return GuardLease(**given)

    def _start(self, run: NodeLaunch) -> None:
        """Start the ranks, and do with them what the head has asked for so far. Raises as NodeLaunch.start; LinkError
        if their lease has run out, which is no refusal."""
        self._keep_lease(run)  # LAUNCH may come late, after the head has given this node up
        if self._link.is_lost:
            raise self._link.lost_error()
        try:
            run.start()
        except StartError as error:
            if error.errno != os.ETIME or self._link.is_lost:
                raise
            self._link.give_up("the lease of the ranks expired before they could start")
            raise self._link.lost_error() from None
        if self._stream is not None:
            self._stream.child_socket.close()
        if not run.starts_more:  # those start here, with these descriptors
            entry = self._signals.entry
            release_caller_descriptors(0 if entry is None else entry.inherited_end)
        self._orders.attach(run)

    # ---- while they run

    def _run_once(self, run: NodeLaunch) -> None:
        """Wait for the ranks and for the head, and pass on what there is."""
        events = run.poll(self._progress.wait_s(self._link.wait_s()), also=(self._poller.fileno(),))
        for event in events:
            self._reports.send_event(event, is_headed=run.headed is not None)
            if event.kind == "progress":
                self._progress.note(event)
            if event.kind == "suspend":
                self._link.suspend(run.suspend, self._stdio.print_line)
        if run.headed is not None:
            self._reports.send_failures(run.headed)
        if not run.ended:  # else the report has them
            self._reports.send_exits(events)
        if run.headed is not None:
            self._reports.send_ends(run.headed, self._progress)
        elif run.first is not None:
            self._reports.send_failure(run.first, time.monotonic_ns())
        self._progress.run_due()
        self._link.poll(0)
        self._keep_lease(run)

    def _keep_lease(self, run: NodeLaunch) -> None:
        """Renew the lease that the guard holds. After its end the ranks are dead, and the head may have given up this
        node."""
        lease = self._link.lease
        if lease is None or self._link.is_lost:
            return
        run.renew_lease(lease.since_ns / 1e9)
        why = ""
        if run.guard_ended:
            why = "the guard of the ranks is gone, and so are they"
        elif run.lease_ended or lease.left_s <= 0:
            length = f"{lease.length_s:g} s (0.9 of --node_timeout)"
            why = self._link.own_absence(LEAST_LEASE * self._link.silence_limit_s, f"its lease of {length} expired")
            why = why or f"the head has not renewed the lease for {length}"
        if why:
            if self._orders.run is not None:  # else the head would take it for a refusal to start them
                self._link.send_error(LinkError(why))  # as far as the connection works
            self._link.give_up(why)

    # ---- the end

    def _finish(self, run: NodeLaunch) -> Report:
        """Close the launch, and send the head its last lines and its report."""
        if run.headed is not None:
            self._reports.send_ends(run.headed, self._progress)
        self.lived_s = None if run.first is None else run.lived_s
        run.record_statuses()  # the head's --report has them, also if nothing failed
        run.close()
        self._orders.detach()
        if self._link.lease is not None:
            self._signals.give_back()
        self._close_relay()
        self._stdio.drain()
        if self._stream is not None:
            self._stream.finish()
        if self._link.is_lost:
            raise self._link.lost_error()
        report = run.outcome.report()
        self._reports.send_done(report, free_ports(self._setup), run.progress)
        return report

    def _close_relay(self) -> None:
        relay, self.relay = self.relay, None
        if relay is not None:
            relay.close()
