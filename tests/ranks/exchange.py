"""Messages between the pytest processes of one `mpiexec`, apart from the messages under test.

Waiting sleeps instead of spinning, because there are often more ranks than cores.
"""

import time
from typing import Any

LONGEST_PAUSE = 0.005  # seconds


class Exchange:
    """All-to-all trades of small Python objects on a private duplicate of the world.

    Every rank calls `trade` the same number of times and then `finish`; a rank that stops early
    calls `finish` sooner, and the others learn of it in their next trade.
    """

    def __init__(self, world: Any) -> None:
        self.comm = world.Dup()
        self.rank: int = self.comm.rank
        self.size: int = self.comm.size
        self.last: dict[int, Any] = {}  # rank -> the last word of a rank that has finished

    def trade(self, message: Any) -> dict[int, Any]:
        """Send `message` to all ranks; return one message of each rank that has not finished."""
        sends = self._send(message, last=False)
        got = {self.rank: message}
        waiting = self._others() - self.last.keys()
        pause = 5e-5
        while waiting or sends:
            for rank in sorted(waiting):
                if (handle := self.comm.improbe(source=rank)) is not None:
                    last, body = handle.recv()
                    (self.last if last else got)[rank] = body
                    waiting.discard(rank)
                    pause = 5e-5
            sends = [request for request in sends if not request.test()[0]]
            if waiting or sends:
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
        return got

    def finish(self, message: Any, wait: bool = True) -> dict[int, Any]:
        """Send the last word and return those of all ranks; nothing may be traded after it."""
        sends = self._send(message, last=True)
        while wait and (sends or self._others() - self.last.keys()):
            for rank in self._others() - self.last.keys():
                while (handle := self.comm.improbe(source=rank)) is not None:
                    last, body = handle.recv()
                    if last:
                        self.last[rank] = body
                        break
            sends = [request for request in sends if not request.test()[0]]
            time.sleep(LONGEST_PAUSE)
        return {self.rank: message, **self.last}

    def _others(self) -> set[int]:
        return set(range(self.size)) - {self.rank}

    def _send(self, message: Any, last: bool) -> list[Any]:
        return [self.comm.isend((last, message), dest=rank) for rank in sorted(self._others())]
