"""Saving beside the training: the run waits for a copy of its state, and a thread writes the copy.

Copying is done at the speed of memory, writing at that of a disk that forces every byte down. One copy
at a time: who saves again before the last one is written waits for it. What the thread could not write
is told at the next step, and a run ends only when its last checkpoint is whole, unless it is killed;
what a kill leaves half written does not look whole.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar

import numpy.typing as npt

from bert_cli.train.step import State


@dataclass(frozen=True)
class Held:
    """A weight or a moment as it was."""

    value: npt.NDArray[Any]
    is_sharded: ClassVar[bool] = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value."""
        return self.value.shape

    def numpy(self) -> npt.NDArray[Any]:
        """Return the value."""
        return self.value

    def assign(self, value: npt.NDArray[Any]) -> None:
        """Refuse: what was does not change."""
        raise TypeError("a copy of a state is only read")


def copied(state: State) -> State:
    """The four things as they are now, which go on changing without it.

    Where the moments are shared out over processes, all of them take part.
    """
    return State(
        {name: Held(weight.numpy()) for name, weight in state.weights.items()},
        {
            name: (Held(first.numpy()), Held(second.numpy()))
            for name, (first, second) in state.moments.items()
        },
        state.loss_scale,
        state.step,
    )


class Writer:
    """Writes one thing at a time in a thread of its own. As a context it ends when all is written."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, write: Callable[[], None]) -> None:
        """Write when what came before is written. Raises what went wrong with that."""
        self.wait()
        # A daemon: whoever stops a run at once does not wait for a disk.
        self._thread = threading.Thread(target=self._run, args=(write,), name="save", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """Raise what went wrong since the last look."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def wait(self) -> None:
        """Return when everything is written. Raises what went wrong."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.look()

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:
            self._error = error

    def __enter__(self) -> "Writer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Wait, also after an error of the run, but not when it is to stop at once."""
        if kind is None:
            self.wait()
        elif issubclass(kind, Exception) and self._thread is not None:
            self._thread.join()
