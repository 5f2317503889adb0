"""Background tasks that do not fail unnoticed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine


class Tasks:
    """The background tasks of one object: kept alive, reported when they fail, ended together."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<Tasks {len(self._running)} running>"

    def spawn(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        """Runs ``work`` until it ends, or until `aclose`."""
        task = asyncio.ensure_future(work)
        self._running.add(task)
        task.add_done_callback(self._done)
        return task

    async def aclose(self) -> None:
        """Cancels what still runs, and waits for its end. Idempotent."""
        waiting = self._running - {asyncio.current_task()}
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            report("a background task failed", error)


def report(message: str, error: BaseException) -> None:
    """Tells the event loop's exception handler of a failure that nobody awaits."""
    asyncio.get_running_loop().call_exception_handler({"message": message, "exception": error})
