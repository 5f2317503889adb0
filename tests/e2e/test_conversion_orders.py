"""Orders of roles that cross, come late, come from two gateways, or meet a node that drains."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import attrs
import pytest

from clusters import Deployment
from orders import NAMES, Orders, role_of
from prfaas.core import NodeId, Role
from prfaas.policy import LoadLedger, ThresholdController, ThresholdRouter
from prfaas.runtime.gateway import Gateway, GatewayConfig
from prfaas.runtime.messages import (
    Cancel,
    Expect,
    Expecting,
    Failed,
    Message,
    NodeInfo,
    Prefill,
    Register,
    RoleSet,
    SetRole,
    encode,
)
from prfaas.seams import BalancerEvent, ChangePhase, LinkRate, NodeLoad, RoleBalancer, RoleChanged
from prfaas.testing.engine import toy_spec
from toys import (
    REMOTE,
    Pause,
    RawPeer,
    a_request,
    check_answer,
    check_serves,
    in_loop,
    start,
    toys,
    until,
    work,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(30)]
P, D, M = Role.PREFILL, Role.DECODE, Role.MIXED
BUSY = GatewayConfig(retry_s=0.002, max_retry_s=0.01, tick_s=0.005, control_s=0.01)


@in_loop
async def test_the_last_order_is_given_although_an_answer_to_an_earlier_one_looks_like_it() -> None:
    orders = Orders(REMOTE)
    async with toys(names=NAMES, balancer=orders) as d:
        reports = d.workers["decode1"]._reports
        tell, held = reports._tell, list[Message]()
        reports._tell = held.append  # type: ignore[method-assign]
        orders.order({"decode1": M})
        await until(lambda: len(held) == 1)
        orders.order({"decode1": P})
        await until(lambda: len(held) == 2)
        assert role_of(d, "decode1") == (P, True)  # before the answer is heard
        tell(held[0])
        await until(lambda: role_of(d, "decode1")[0] is M)
        orders.order({"decode1": M})
        await until(lambda: d.nodes["decode1"].role is M)
        reports._tell = tell  # type: ignore[method-assign]
        for message in held[1:]:
            tell(message)
        await until(lambda: orders.phases("decode1")[-1:] == [ChangePhase.DONE])
        await until(lambda: role_of(d, "decode1") == (M, False))
        await check_serves(d)


class InOneBatch(Orders):
    """Asks for a change at one event of a batch, and for another thing at a later one."""

    def __init__(self) -> None:
        super().__init__(REMOTE)
        self.asked: dict[str, int] = {}
        self.changes: dict[NodeId, int] = {}

    def observe(self, event: BalancerEvent, now: float) -> None:
        super().observe(event, now)
        if isinstance(event, LinkRate) and not self.asked:
            self._ask("decode1", P)
        elif isinstance(event, NodeLoad) and len(self.asked) == 1:
            self._ask("local1", M)
        elif isinstance(event, RoleChanged):
            self.changes[event.node_id] = event.plan_epoch

    def _ask(self, name: str, role: Role) -> None:
        self.order({name: role})
        self.asked[name] = self.ordered.epoch


@in_loop
async def test_a_change_has_the_epoch_of_the_first_plan_that_asked_for_it() -> None:
    orders = InOneBatch()
    async with toys(names=NAMES, balancer=orders, config=BUSY) as d:
        await until(
            lambda: orders.asked.items() <= orders.changes.items() and len(orders.asked) == 2
        )
        assert orders.asked["local1"] == orders.asked["decode1"] + 1
        # A new budget is no new change of role.
        orders.order({}, {"local1": 4})
        orders.changes.clear()
        await until(lambda: orders.changes)
        assert orders.changes == {"local1": orders.asked["local1"]}
        await check_serves(d)


@in_loop
async def test_a_connection_that_is_new_begins_with_the_order_that_holds() -> None:
    orders = Orders(REMOTE)
    async with toys(names=NAMES, balancer=orders) as d:
        node = d.nodes["decode1"]
        orders.order({"decode1": M}, {"decode1": 4})
        await until(lambda: node.schedule._decode_rounds == 4)
        for line in tuple(d.workers["decode1"]._lines):
            line.abort()
        await until(lambda: "decode1" not in d.gateway.workers)
        orders.order({})
        await d.add("decode1")
        await until(lambda: node.schedule._decode_rounds == 1)
        assert node.role is M
        await check_serves(d)


@in_loop
async def test_a_gateway_that_closes_leaves_the_roles_alone() -> None:
    async with toys(names=("local", "decode")) as d:
        await d.gateway.aclose()
        await until(lambda: not any(worker._lines for worker in d.workers.values()))
        assert {name: node.role for name, node in d.nodes.items()} == {"local": P, "decode": D}
        d.check_empty()


@in_loop
async def test_a_message_of_a_connection_that_was_given_up_changes_nothing() -> None:
    orders = Orders(REMOTE)
    async with toys(names=NAMES, balancer=orders) as d:
        fleet = d.gateway._fleet
        link = fleet.links[NodeId("decode1")]
        orders.heard.clear()

        async def late() -> bytes:
            fleet._lose(link, "given up while this was under way")
            return encode(RoleSet(role="prefill", plan_epoch=1))

        link.line.receive = late  # type: ignore[method-assign]
        await fleet.statuses(1.0)  # the present call of receive ends
        await until(lambda: "decode1" not in d.gateway.workers)
        await asyncio.sleep(0.01)
        assert orders.phases("decode1") == []
        assert not d.reports
        await check_serves(d)


@in_loop
async def test_a_prompt_that_is_given_back_is_no_failure_for_its_decode_node_either() -> None:
    """The two nodes speak on connections of their own: this may be heard first."""
    async with toys(names=NAMES, balancer=Orders(REMOTE)) as d:
        pause = Pause(d.nodes["local1"].engine, "prefill")
        prefill = await RawPeer.dial(d, d.workers["local1"].address)
        decode = await RawPeer.dial(d, d.workers["decode1"].address)
        for name in ("first", "second"):
            await decode.say(Expect(**work(name), prefill_node="local1"))
            await decode.hear(Expecting)
            await prefill.say(
                Prefill(
                    **work(name),
                    decode_node="decode1",
                    decode_address=d.workers["decode1"].address,
                )
            )
        await pause.reached()
        # Offered, and so known to the decode node.
        await until(lambda: all(j.peer_line for j in d.workers["decode1"]._jobs.values()))
        await prefill.say(SetRole(role="decode", plan_epoch=1))
        for peer in (prefill, decode):
            failed = await peer.hear(Failed)
            assert failed.request_id == "second"
            assert failed.busy
            assert failed.at_fault == "local1"
        pause.release()
        prefill.channel.abort()
        decode.channel.abort()
        await check_serves(d)


@in_loop
async def test_a_gateway_that_comes_while_a_node_drains_is_told_so() -> None:
    orders = Orders(REMOTE)
    async with toys(names=NAMES, balancer=orders) as d:
        pause = Pause(d.nodes["decode1"].engine, "decode")
        tasks = [start(d, a_request(seed=i)) for i in range(4)]
        await pause.reached()
        orders.order({"decode1": P})
        await until(lambda: orders.phases("decode1") == [ChangePhase.STARTED])
        raw = await RawPeer.dial(d, d.workers["decode1"].address)
        await raw.say(Register())
        assert (await raw.hear(NodeInfo)).role == "prefill"
        epoch = orders.ordered.epoch
        told = RoleSet(role="prefill", plan_epoch=epoch, phase="started")
        assert await raw.hear(RoleSet) == told
        pause.release()
        await asyncio.gather(*tasks)
        assert await raw.hear(RoleSet) == RoleSet(role="prefill", plan_epoch=epoch)
        raw.channel.abort()
        await check_serves(d)


@in_loop
async def test_work_that_came_while_a_node_rebuilt_is_ended_before_its_change_is() -> None:
    orders, rebuilt, go = Orders(REMOTE), [], threading.Event()

    def rebuild(role: Role) -> None:
        rebuilt.append(role)
        assert go.wait(5)

    async with toys(names=NAMES, balancer=orders, on_role=rebuild) as d:
        raw = await RawPeer.dial(d, d.workers["decode1"].address)
        orders.order({"decode1": P})
        await until(lambda: rebuilt)
        await raw.say(SetRole(role="decode", plan_epoch=70))
        await raw.say(Expect(**work(), prefill_node="remote"))
        await raw.hear(Expecting)
        await raw.say(SetRole(role="prefill", plan_epoch=71))
        await until(lambda: d.nodes["decode1"].conversion.plan_epoch == 71)
        go.set()
        await until(lambda: not d.workers["decode1"]._is_converting)
        assert ChangePhase.DONE not in orders.phases("decode1")
        await raw.say(Cancel(request_id="raw", attempt=0, reason="enough"))
        await until(lambda: orders.phases("decode1")[-1:] == [ChangePhase.DONE])
        assert rebuilt == [P, P]
        raw.channel.abort()
        await check_serves(d)


@in_loop
async def test_a_node_that_failed_to_rebuild_does_not_try_again_while_it_goes_down() -> None:
    orders, rebuilt, go = Orders(REMOTE), [], threading.Event()

    def rebuild(role: Role) -> None:
        rebuilt.append(role)
        assert go.wait(5)
        raise RuntimeError("no kernels")

    async with toys(names=NAMES, balancer=orders, on_role=rebuild) as d:
        raw = await RawPeer.dial(d, d.workers["decode1"].address)
        orders.order({"decode1": M})
        await until(lambda: rebuilt)
        await raw.say(Expect(**work(), prefill_node="remote"))
        await raw.hear(Expecting)
        go.set()
        await until(lambda: "decode1" not in d.gateway.workers)
        assert rebuilt == [M]
        assert len(d.reports) == 1
        d.reports.clear()
        raw.channel.abort()
        await check_serves(d)


@asynccontextmanager
async def another_gateway(d: Deployment, balancer: RoleBalancer) -> AsyncIterator[Gateway]:
    """A second front for the same workers, with a plan of its own."""
    spec = toy_spec()
    controller = ThresholdController(spec, band=(REMOTE, REMOTE))
    gateway = Gateway(
        spec=spec,
        router=ThresholdRouter(spec, controller),
        ledger=LoadLedger.for_spec(spec),
        balancer=balancer,
        transport=d.transport(),
        hello=attrs.evolve(d.hello, node_id=NodeId("gateway2")),
        controller=controller,
        config=BUSY,
    )
    gateway.start()
    try:
        for worker in d.workers.values():
            await gateway.add_worker(worker.address)
        yield gateway
    finally:
        await gateway.aclose()


@in_loop
async def test_of_two_gateways_with_different_plans_the_last_order_counts_and_nothing_is_lost() -> (
    None
):
    mine, other = Orders(REMOTE), Orders(REMOTE)
    async with toys(names=NAMES, balancer=mine, config=BUSY) as d, another_gateway(d, other) as two:
        requests = [a_request(seed=i, num_tokens=40) for i in range(60)]
        tasks = []
        for i, request in enumerate(requests):
            gateway = (d.gateway, two)[i % 2]
            tasks.append(asyncio.create_task(gateway.generate(request)))
            if i % 10 == 0:
                mine.order({"decode1": (P, D, M)[i % 3], "local2": P})
            if i % 10 == 5:
                other.order({"decode1": (D, M, P)[i % 3], "local2": D})
            await asyncio.sleep(0.002)
        for task, request in zip(tasks, requests, strict=True):
            check_answer(await task, request)
        mine.order({"decode1": M})
        await until(lambda: d.nodes["decode1"].role is M)
        await until(lambda: role_of(d, "decode1") == (M, False))
        request = a_request(seed=70)
        check_answer(await two.generate(request), request)
        assert two.num_active == two._ledger.num_in_flight == 0
        two._ledger.check()
        await check_serves(d)
