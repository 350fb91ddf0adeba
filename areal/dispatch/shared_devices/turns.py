"""Turns of several threads: each use begins when there is room for it next to those that have begun. Later uses are predicted."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import Any

from areal.dispatch.shared_devices.eviction import LOOKAHEAD
from areal.dispatch.shared_devices.placement import Placement
from areal.dispatch.shared_devices.uses import Move, Need, Use

CALL = object()
"""Holder of the uses of calls that run on the ranks: they end without the driver."""


class Turn:
    """One use of a model or a rollout. Create it, pass it to :meth:`Turns.begin`, and end it in any thread.

    Args:
        turns: turns of the same devices.
        need: model or rollout, and its use.
        background: does not begin while another use waits, and is independent of the other uses of its thread.
        call: the use of one call. Nothing else of the model moves meanwhile.
        ended: has ended without a begin.

    Attributes:
        thread: the thread that made it.
        holder: equal for turns that one thread has at the same time.
    """

    def __init__(
        self,
        turns: Turns,
        need: Need,
        *,
        background: bool = False,
        call: bool = False,
        ended: bool = False,
    ) -> None:
        self._turns = turns
        self.need = need
        self.background, self.call = background, call
        self.thread = threading.get_ident()
        self.holder: object = self if background else self.thread
        self.ended = ended

    def begin(self) -> None:
        """Begin the use; see :meth:`Turns.begin`."""
        self._turns.begin(self)

    def begin_now(self) -> bool:
        """Begin the use if it needs neither a wait nor a move; see :meth:`Turns.begin_now`."""
        return self._turns.begin_now(self)

    def end(self) -> None:
        """End the use, or the wait for it. May be called twice."""
        self._turns.end(self)

    def end_with(self, call: Future[Any]) -> None:
        """End the use when a call has ended on the ranks, also if nothing waits for its result."""
        self.holder = CALL
        call.add_done_callback(lambda _: self.end())


class Turns:
    """Begins uses one after the other, each as soon as it fits next to those that have begun.

    One thread at a time moves state. A use that does not fit waits for others to end, unless they cannot end because all of them wait, too:
    then it raises.

    Args:
        placement: decides on the moves.
        move: executes moves.
        observe: measures models and rollouts, and corrects the placement. It gets the uses that have ended, by name, and returns the names of
            those that cannot be measured now.
    """

    def __init__(
        self,
        placement: Placement,
        move: Callable[[Sequence[Move]], None],
        observe: Callable[[dict[str, set[Use]]], Collection[str]],
    ) -> None:
        self._placement, self._move, self._observe = placement, move, observe
        self._history = History()
        # Guards what is below and the placement. It is held for planning only: calls end in threads that must not wait for a move.
        self._changed = threading.Condition()
        self._waiting: list[Turn] = []
        self._active: list[Turn] = []
        self._mover: int | None = None
        # Needs of turns that have ended. The garbage collector may end one in any thread, also while it plans.
        self._released: deque[Need] = deque()
        self._unobserved: defaultdict[str, set[Use]] = defaultdict(set)

    # ---- begin and end

    def begin(self, turn: Turn) -> None:
        """Wait until a use fits, and move what it needs to the device.

        Raises:
            ValueError: it can never fit, or not next to uses that cannot end before it begins.
        """
        # Moves are calls of the engines, too.
        turn.ended |= self._mover == threading.get_ident()
        if turn.ended:
            return
        with self._changed:
            self._waiting.append(turn)
        try:
            while not self._try(turn):
                pass
        except BaseException:
            turn.end()
            raise
        finally:
            with self._changed:
                if turn in self._waiting:
                    self._waiting.remove(turn)
                self._changed.notify_all()

    def begin_now(self, turn: Turn) -> bool:
        """Begin a use that needs neither a wait nor a move. Returns whether it has begun."""
        with self._changed:
            if turn.ended:
                return True
            if not self._may_begin(turn) or turn.need.owner in self._unobserved or not self._placement.ready(turn.need):
                return False
            self._plan(turn)
            return True

    def end(self, turn: Turn) -> None:
        """End a use, or the wait for it."""
        with self._changed:
            if turn.ended:
                return
            turn.ended = True
            if turn in self._active:
                self._active.remove(turn)
                self._released.append(turn.need)
            self._changed.notify_all()

    def settle(self, names: Collection[str] = ()) -> None:
        """Measure the models and rollouts whose uses have ended, and those in ``names``."""
        me = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: self._mover is None)
            for name in names:
                self._unobserved[name].add(Use.CHANGE)
            self._mover = me
        try:
            self._observe_ended()
        finally:
            self._rest()

    def remove(self, name: str) -> None:
        """Remove a model or a rollout that is gone, with its uses."""
        with self._changed:
            self._changed.wait_for(lambda: self._mover is None)
            for turn in [turn for turn in self._active if turn.need.owner == name]:
                self.end(turn)
            self._release()
            self._unobserved.pop(name, None)
            self._history.forget(name)
            if name in self._placement:
                self._placement.remove(name)
            self._changed.notify_all()

    def forget(self, name: str) -> None:
        """Note that a model's processes hold nothing any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._mover is None)
            self._unobserved[name].add(Use.CHANGE)
            self._placement.forget(name)

    # ---- helpers

    def _try(self, turn: Turn) -> bool:
        """Wait for a turn and begin the use. Returns False if it does not fit by what was measured then."""
        with self._changed:
            self._changed.wait_for(lambda: turn.ended or self._may_begin(turn))
            if turn.ended:
                return True
            self._mover = threading.get_ident()
        try:
            self._observe_ended()
            with self._changed:
                # Its task may have been cancelled meanwhile: nobody would end the use.
                if turn.ended:
                    return True
                if not self._fits(turn):
                    return False
                moves = self._plan(turn)
            try:
                self._move(moves)
            except BaseException:
                for move in moves:
                    self._unobserved[move.part.owner] |= set()
                turn.end()
                self._observe_ended()
                raise
            return True
        finally:
            self._rest()

    def _rest(self) -> None:
        """Let another thread move."""
        with self._changed:
            self._mover = None
            self._changed.notify_all()

    def _may_begin(self, turn: Turn) -> bool:
        if self._mover is not None:
            return False
        if turn.background and not all(each.background for each in self._waiting):
            return False
        return self._fits(turn)

    def _fits(self, turn: Turn) -> bool:
        """Return whether a use fits now, or cannot wait: then the placement raises."""
        self._release()
        if not self._lacks_room(turn):
            return True
        # The thread of a background use counts, too: a use that this thread has would not end.
        waiting = {each.holder for each in self._waiting if self._lacks_room(each)} | {turn.thread}
        return all(each.holder in waiting for each in self._active)

    def _lacks_room(self, turn: Turn) -> bool:
        """Return whether a use must wait for others to end."""
        busy = self._busy()
        moves_busy_model = turn.need.owner in busy and not self._placement.ready(turn.need)
        return moves_busy_model or self._placement.blocked(turn.need, busy)

    def _busy(self) -> set[str]:
        """Return the names of models that calls use. A move would wait for the call, which may wait for the move if it runs in this process."""
        return {turn.need.owner for turn in self._active if turn.call}

    def _plan(self, turn: Turn) -> list[Move]:
        """Begin a use in the placement. Returns the moves that it needs."""
        upcoming = () if self._placement.ready(turn.need) else self._history.following(turn.need)
        moves = self._placement.request(turn.need, upcoming, self._busy())
        self._history.add(turn.need)
        self._active.append(turn)
        # Not later: a holder that has begun does not wait.
        if turn in self._waiting:
            self._waiting.remove(turn)
        return moves

    def _release(self) -> None:
        """End the uses of turns that have ended in the placement, too."""
        while self._released:
            need = self._released.popleft()
            self._placement.release(need)
            self._unobserved[need.owner].add(need.use)

    def _observe_ended(self) -> None:
        """Measure what has ended, without models that are in use: these are measured afterwards."""
        with self._changed:
            self._release()
            busy = {turn.need.owner for turn in self._active}
            ended = {name: self._unobserved.pop(name) for name in self._unobserved.keys() - busy}
        # Lost models are measured again, until they have other processes. After an error, all are.
        again: Collection[str] = list(ended)
        try:
            again = self._observe(ended) if ended else ()
        finally:
            with self._changed:
                for name in again:
                    self._unobserved[name].add(Use.CHANGE)


LENGTH = 256
"""Number of uses that are remembered."""


class History:
    """The latest uses, without repetitions of one use and without those that need no state."""

    def __init__(self) -> None:
        self._needs: deque[Need] = deque(maxlen=LENGTH)

    def add(self, need: Need) -> None:
        """Add a use."""
        if need.use is not Use.CHANGE and (not self._needs or self._needs[-1] != need):
            self._needs.append(need)

    def forget(self, owner: str) -> None:
        """Remove the uses of a model or a rollout."""
        self._needs = deque((need for need in self._needs if need.owner != owner), maxlen=LENGTH)

    def following(self, need: Need) -> list[Need]:
        """Predict the uses after ``need``, which is about to begin: those that followed it after the same uses before.

        Returns:
            At most :data:`LOOKAHEAD` uses; none for a use that is new.
        """
        needs = [*self._needs] if self._needs and self._needs[-1] == need else [*self._needs, need]
        last = len(needs) - 1
        # The position whose uses before it agree with the latest ones for longest, and the latest of these.
        agreeing = [(_agreeing(needs, i, last), i) for i in range(last) if needs[i] == need]
        if not agreeing:
            return []
        start = max(agreeing)[1]
        # The uses since then repeat.
        period = last - start
        return [needs[start + 1 + k % period] for k in range(LOOKAHEAD)]


def _agreeing(needs: list[Need], i: int, j: int) -> int:
    """Return the number of equal uses before two positions, at most :data:`LOOKAHEAD`."""
    n = 0
    while n < min(i, LOOKAHEAD) and needs[i - n - 1] == needs[j - n - 1]:
        n += 1
    return n
