"""Runs a workload through simulated clusters under real policies."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from random import Random
from typing import TypeAlias

from prfaas.errors import ConfigError
from prfaas.policy import LoadLedger, ThresholdController
from prfaas.seams import RoleBalancer, Router
from prfaas.simulator.agenda import Agenda, Call
from prfaas.simulator.gateway import Gateway
from prfaas.simulator.request_log import Ending
from prfaas.simulator.result import SimulationResult
from prfaas.simulator.scenario import Scenario
from prfaas.workload import Arrival

OnProgress: TypeAlias = Callable[[float, int], None]
"""Called once per control period with the simulated time and the requests that ended."""
_STALL_S = 3600.0
"""When nothing but the control loop runs for so long, nothing else will happen."""


class Simulator:
    """A scenario under a policy. Router, ledger, balancer and controller keep what they learn, so
    give every run its own.

    Args:
        scenario: what is simulated.
        router, ledger, balancer: the policy, as a gateway takes it.
        controller: the router's threshold controller, if it has one.
        seed: of the choices between equal nodes, the only random thing here.
    """

    def __init__(
        self,
        scenario: Scenario,
        *,
        router: Router,
        ledger: LoadLedger,
        balancer: RoleBalancer,
        controller: ThresholdController | None = None,
        seed: int = 0,
    ) -> None:
        self._scenario = scenario
        self._router = router
        self._ledger = ledger
        self._balancer = balancer
        self._controller = controller
        self._seed = seed

    def run(
        self,
        arrivals: Iterable[Arrival],
        *,
        until_s: float | None = None,
        on_progress: OnProgress | None = None,
    ) -> SimulationResult:
        """Lets requests in at their times, until all of them have ended or ``until_s`` is over.

        Raises:
            ConfigError: arrivals out of order, or two requests of one id at a time.
        """
        simulation = self.begin(arrivals, on_progress=on_progress)
        simulation.run(until_s)
        return simulation.result()

    def run_closed(
        self,
        arrivals: Iterable[Arrival],
        num_clients: int,
        *,
        until_s: float | None = None,
        on_progress: OnProgress | None = None,
    ) -> SimulationResult:
        """As `run`, but each of ``num_clients`` clients sends its next request as soon as its last
        one has ended; the times of the arrivals are ignored. With enough clients the throughput
        is that at saturation."""
        if num_clients < 1:
            raise ConfigError(f"num_clients is {num_clients}; it must be at least 1")
        simulation = self.begin(arrivals, num_clients=num_clients, on_progress=on_progress)
        simulation.run(until_s)
        return simulation.result()

    def begin(
        self,
        arrivals: Iterable[Arrival],
        *,
        num_clients: int | None = None,
        on_progress: OnProgress | None = None,
    ) -> Simulation:
        """A run to be stepped through by the caller."""
        return Simulation(
            self._scenario,
            iter(arrivals),
            router=self._router,
            ledger=self._ledger,
            balancer=self._balancer,
            controller=self._controller,
            rng=Random(self._seed),
            num_clients=num_clients,
            on_progress=on_progress,
        )


class Simulation:
    """One run. `Simulator` makes them."""

    def __init__(
        self,
        scenario: Scenario,
        arrivals: Iterator[Arrival],
        *,
        router: Router,
        ledger: LoadLedger,
        balancer: RoleBalancer,
        controller: ThresholdController | None,
        rng: Random,
        num_clients: int | None,
        on_progress: OnProgress | None,
    ) -> None:
        self._scenario = scenario
        self._arrivals = arrivals
        self._has_more = True
        self._is_closed = num_clients is not None
        self._on_progress = on_progress
        self._num_due = 0
        self._num_arrived = 0
        self._quiet_since_s = 0.0
        self._is_stalled = False
        self.agenda = Agenda()
        self.gateway = Gateway(
            scenario,
            self.agenda,
            router=router,
            ledger=ledger,
            balancer=balancer,
            controller=controller,
            rng=rng,
            on_ended=self._ended,
        )
        self.gateway.fleet.start()
        self.agenda.at(scenario.control_period_s, self._control)
        for _ in range(num_clients or 1):
            self._feed()

    def __repr__(self) -> str:
        return f"<Simulation at {self.agenda.now} s, {self.gateway!r}>"

    @property
    def is_over(self) -> bool:
        """Whether every request has ended, or none of the others ever will."""
        return self._is_stalled or not (self._has_more or self._num_due or self.gateway.flights)

    def step(self) -> bool:
        """Makes the next thing happen; False if there is nothing left to happen."""
        if self.is_over:
            return False
        self.agenda.step()
        return True

    def run(self, until_s: float | None = None) -> None:
        """Goes on to the end, or to ``until_s``."""
        agenda, flights = self.agenda, self.gateway.flights
        end_s = math.inf if until_s is None else until_s
        while (flights or not self.is_over) and not self._is_stalled and agenda.step(end_s):
            pass

    def check(self) -> None:
        """Asserts that every request is in exactly one place."""
        self.gateway.check()

    def result(self) -> SimulationResult:
        """What has come of it so far."""
        gateway, now = self.gateway, self.agenda.now
        nodes = gateway.fleet.nodes.values()
        egress, ingress = gateway.shipping.egress, gateway.shipping.ingress
        egress.account()
        ingress.account()
        num_left = len(gateway.flights)
        capacity_bytes = egress.capacity_bytes()
        gateway.counters["events"] = self.agenda.num_calls
        return SimulationResult(
            log=gateway.log,
            duration_s=now,
            num_accepted=self._num_arrived - gateway.log.num_ended(Ending.REJECTED),
            num_unfinished=0 if self._is_stalled else num_left,
            num_lost=num_left if self._is_stalled else 0,
            counters=gateway.counters,
            conversions=tuple(gateway.fleet.conversions),
            decisions=tuple(gateway.decisions),
            prefill_utilisation={n.node_id: n.prefill_share() for n in nodes},
            decode_utilisation={n.node_id: n.decode_share() for n in nodes},
            node_roles={n.node_id: n.role for n in nodes},
            egress_bytes=egress.sent_bytes,
            ingress_bytes=ingress.sent_bytes,
            link_utilisation=egress.sent_bytes / capacity_bytes if capacity_bytes else 0.0,
            link_busy=egress.busy_s / now if now else 0.0,
        )

    def _feed(self) -> None:
        """Fetches the next arrival, and lets it in when its time has come."""
        arrival = next(self._arrivals, None)
        if arrival is None:
            self._has_more = False
            return
        now = self.agenda.now
        at_s = now if self._is_closed else arrival.arrived_s
        if at_s < now:
            raise ConfigError(
                f"request {arrival.request_id!r} arrives at {at_s} s, after one of {now} s; sort "
                "the arrivals by their times"
            )

        def arrive(_: Call) -> None:
            self._num_due -= 1
            self._num_arrived += 1
            self.gateway.accept(arrival)
            if not self._is_closed:
                self._feed()

        self._num_due += 1
        self.agenda.at(at_s, arrive)

    def _ended(self) -> None:
        if self._is_closed:
            self._feed()

    def _control(self, _: Call) -> None:
        agenda = self.agenda
        self.gateway.fleet.control(self.gateway.shipping.egress)
        if self._on_progress is not None:
            self._on_progress(agenda.now, len(self.gateway.log))
        if len(agenda):
            self._quiet_since_s = agenda.now
        elif agenda.now - self._quiet_since_s >= _STALL_S:
            self._is_stalled = True
            return
        agenda.at(agenda.now + self._scenario.control_period_s, self._control)
