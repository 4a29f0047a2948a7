"""Save in the background: training waits for a copy of the state, and a thread writes the copy.

Copying runs at the speed of memory, writing at that of a disk that forces every byte down. There is one
copy at a time: a second save waits for the first. An error of the thread is raised at the next step. A
run ends when its last checkpoint is complete; what a kill leaves is not taken for a checkpoint.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar

import numpy.typing as npt

from bert_cli.train.step import State


@dataclass(frozen=True)
class SavedValue:
    """A copy of a weight or a moment."""

    value: npt.NDArray[Any]
    is_sharded: ClassVar[bool] = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the value."""
        return self.value.shape

    def numpy(self) -> npt.NDArray[Any]:
        """Return the value."""
        return self.value

    def assign(self, value: npt.NDArray[Any]) -> None:
        """Raise TypeError."""
        raise TypeError("the copy of a state cannot be changed")


def copy_state(state: State) -> State:
    """Return a copy of the state. With sharded moments all processes have to call it or `gather_moments`."""
    return State(
        {name: SavedValue(weight.numpy()) for name, weight in state.weights.items()},
        {
            name: (SavedValue(first.numpy()), SavedValue(second.numpy()))
            for name, (first, second) in state.moments.items()
        },
        state.loss_scale,
        state.step,
    )


def gather_moments(state: State) -> None:
    """Send this process' shards of the moments to the process that copies the state."""
    for pair in state.moments.values():
        for moment in pair:
            if moment.is_sharded:
                moment.numpy()


class BackgroundWriter:
    """Runs one write at a time in a thread. As a context it waits for the last one."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, write: Callable[[], None]) -> None:
        """Start a write when the one before has ended. Raises that one's error."""
        self.wait()
        # A daemon: a run that is killed by a second request to stop does not wait for a disk.
        self._thread = threading.Thread(target=self._run, args=(write,), name="save", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise the error of a write that has failed, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def wait(self) -> None:
        """Wait until everything is written. Raises the error of a write that failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:
            self._error = error

    def __enter__(self) -> "BackgroundWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Wait, also after an error of the run, but not after KeyboardInterrupt."""
        if kind is None:
            self.wait()
        elif issubclass(kind, Exception) and self._thread is not None:
            self._thread.join()
