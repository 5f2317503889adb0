"""An adversary owns the link and the processes; the entry arrives right, or both sides let go.

What the pair itself asserts at every step: the check() of both machines, no write through a closed
window, no block released under an open window or under a put, one end per side, and the very bytes
of the prefill at the moment of the installation.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from helpers import Piece, TransferPair
from pools import FULL, MLA, STATE, WINDOW, tiny_spec
from prfaas.transfer import Cancel, EndCode, Progress, TransferState

LAYERS = st.lists(st.sampled_from([FULL, MLA, WINDOW, STATE]), min_size=1, max_size=5)
SIDES = st.sampled_from(["sender", "receiver"])
PICK = st.integers(0, 2**16)
LEASE_S = 10.0
UNTIL_S = 40.0


class TransferAdversary(RuleBasedStateMachine):
    pair: TransferPair
    todo: list[Piece]
    num_disasters: int
    is_in_order = True

    @initialize(
        layers=LAYERS,
        num_tokens=st.integers(0, 20),
        held=st.integers(0, 20),
        block_sizes=st.permutations([4, 8, 16]),
        num_senders=st.integers(1, 3),
        reports_landings=st.booleans(),
        chunk_bytes=st.integers(6, 90),
        seed=st.integers(0, 2**16),
        order=st.randoms(use_true_random=False),
        num_disasters=st.integers(0, 2),
    )
    def start(
        self, layers, num_tokens, held, block_sizes, num_senders, reports_landings, chunk_bytes,
        seed, order, num_disasters,
    ):  # fmt: skip
        self.pair = TransferPair(
            tiny_spec(*layers),
            num_tokens,
            start_token=min(held, num_tokens),
            block_sizes=block_sizes[:2],
            num_senders=num_senders,
            reports_landings=reports_landings,
            chunk_bytes=chunk_bytes,
            lease_s=LEASE_S,
            until_s=UNTIL_S,
            seed=seed,
        )
        self.todo = self.pair.pieces()
        order.shuffle(self.todo)
        self.num_disasters = num_disasters

    # The prefill.

    @precondition(lambda self: self.todo)
    @rule(how_many=st.integers(1, 6))
    def finish_pieces(self, how_many):
        for _ in range(min(how_many, len(self.todo))):
            self.pair.make_ready(self.todo.pop())

    @precondition(lambda self: not self.todo)
    @rule()
    def finish_prefill(self):
        self.pair.finish()
        self.pair.report_ranks()

    # The control frames: delayed at will, repeated, swapped.

    @precondition(lambda self: self.pair.to_receiver)
    @rule()
    def deliver_to_receiver(self):
        self.pair.deliver_to_receiver()

    @precondition(lambda self: self.pair.to_sender)
    @rule()
    def deliver_to_sender(self):
        self.pair.deliver_to_sender()

    @precondition(lambda self: self.pair.to_sender or self.pair.to_receiver)
    @rule(swap=st.booleans())
    def disturb_frames(self, swap):
        for frames in (self.pair.to_sender, self.pair.to_receiver):
            if swap:
                self.is_in_order &= len(frames) < 2
                frames.rotate()
            elif frames:
                frames.append(frames[0])

    # The puts: in any order, in pieces, twice, lost before or after they landed.

    @rule()
    def start_puts(self):
        self.pair.start_puts()

    def _put(self, pick, *, landed):
        puts = [put for put in self.pair.puts if put.landed is landed]
        return puts[pick % len(puts)]

    @precondition(lambda self: self.pair.flying())
    @rule(pick=PICK, partly=st.booleans())
    def land_a_put(self, pick, partly):
        self.pair.land(self._put(pick, landed=False), partly=partly)

    @precondition(lambda self: self.pair.flying())
    @rule(pick=PICK)
    def keep_a_copy(self, pick):
        self.pair.haunt(self._put(pick, landed=False))

    @precondition(lambda self: self.pair.ghosts)
    @rule()
    def land_a_copy(self):
        self.pair.land_ghost()

    @precondition(lambda self: len(self.pair.flying()) < len(self.pair.puts))
    @rule(pick=PICK, lose=st.booleans())
    def answer_a_put(self, pick, lose):
        put = self._put(pick, landed=True)
        self.pair.fail(put) if lose else self.pair.acknowledge(put)

    @precondition(lambda self: self.pair.flying())
    @rule(pick=PICK)
    def lose_a_put(self, pick):
        self.pair.fail(self._put(pick, landed=False))

    @rule()
    def land_everything(self):
        self.pair.start_puts()
        for put in tuple(self.pair.puts):
            if put in self.pair.puts and not put.landed:
                self.pair.land(put)
        for put in tuple(self.pair.puts):
            if put in self.pair.puts:
                self.pair.acknowledge(put)

    # The clock, the ends, the disasters.

    @rule(duration_s=st.sampled_from([0.1, 1.0, 4.0]))
    def wait(self, duration_s):
        self.pair.wait(duration_s)

    @precondition(lambda self: self.pair.alive["sender"])
    @rule()
    def work(self):
        self.pair.tell_sender(Progress())

    @precondition(lambda self: self.num_disasters)
    @rule(kind=st.sampled_from(["cancel", "kill", "disconnect", "silence"]), side=SIDES)
    def disaster(self, kind, side):
        self.num_disasters -= 1
        pair = self.pair
        match kind:
            case "cancel" if pair.alive[side]:
                tell = pair.tell_sender if side == "sender" else pair.tell_receiver
                tell(Cancel(EndCode.CANCELLED, "given up"))
            case "kill":
                pair.kill(side)
            case "disconnect":
                pair.disconnect()
            case "silence":
                pair.wait(LEASE_S + 1)

    @invariant()
    def nobody_waits_for_ever(self):
        if not hasattr(self, "pair"):
            return
        pair = self.pair
        for side, machine in (("sender", pair.sender), ("receiver", pair.receiver)):
            deadline = machine.next_deadline()
            if pair.alive[side] and not machine.state.is_end:
                assert deadline is not None
                assert deadline <= UNTIL_S
            for data in pair.senders:
                data.check()

    @invariant()
    def what_is_held_is_released_once(self):
        if not hasattr(self, "pair"):
            return
        pair = self.pair
        assert pair.released["sender"] == pair.sender.state.is_end
        installed = pair.receiver.state is TransferState.LANDED
        assert pair.installed == installed
        assert pair.released["receiver"] == (pair.receiver.state.is_end and not installed)
        assert pair.window_open <= (pair.receiver.state is TransferState.ACCEPTED)

    def teardown(self):
        if not hasattr(self, "pair"):
            return
        pair = self.pair
        undisturbed = not pair.ended and pair.connected and all(pair.alive.values())
        if undisturbed:
            pair.run()
            assert pair.installed or not self.is_in_order
        pair.wait(max(UNTIL_S - pair.now, 0.0) + 0.1)
        for side in ("sender", "receiver"):
            assert not pair.alive[side] or side in pair.ended
        if pair.ended.get("sender") and pair.ended["sender"].error is None:
            assert pair.installed, "the sender was told of bytes that are not there"


TestTransferMachine = TransferAdversary.TestCase
TestTransferMachine.settings = settings(stateful_step_count=40)
