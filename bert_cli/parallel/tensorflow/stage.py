"""A stage: consecutive blocks on one device, as two functions, forward and backward.

`forward` gives the hidden values for the next stage and what has to be kept for the way back;
`backward` takes that and the gradient from the next stage, adds the gradients of the weights to
accumulators on the stage's own device, where the first of a step replaces what was there, and gives
the gradient for the stage before. The last stage's is one function, forward, loss and backward: a
turn. Each is traced once, whatever the number of micro-batches. Kept is either everything (a tape),
or only inputs, of each block or of the stage, from which the backward pass computes the rest again.
"""

from collections.abc import Mapping, Sequence, Set
from typing import Any, Literal

import numpy.typing as npt
import tensorflow as tf

from bert_cli.parallel.tensorflow.alike import AlikeBlocks, traced

Columns = Mapping[str, npt.NDArray[Any]]
Tensors = dict[str, tf.Tensor]
Keeps = Literal["all", "layer", "stage"]


def cut(stages: Sequence[Sequence[str]], blocks: Sequence[str]) -> list[list[str]]:
    """The names of the model's blocks by stage: `hid` becomes hid_0, hid_1 and so on, in order.

    `blocks` are all names of the model in running order. Raises ValueError when the stages do not
    list them all.
    """
    rest = iter(blocks)
    found = [[next(rest, "") for _ in stage] for stage in stages]
    asked = [name for stage in stages for name in stage]
    if [name.split("_")[0] if name.startswith("hid") else name for name in blocks] != asked:
        raise ValueError(f"stages ({stages}): do not list the blocks {', '.join(blocks)} in order")
    return found


class Stage:
    """The blocks of a stage, their gradient accumulators, and the functions that run them.

    `body` are blocks `block(hidden, batch, key) -> hidden`; `head`, in the last stage, is
    `head(hidden, labels, counts, key) -> loss, sums`. `weights` are the variables by name. `compiled`
    has XLA compile the functions whole.
    """

    def __init__(
        self,
        body: Sequence[Any],
        head: Any | None,
        weights: Mapping[str, Any],
        *,
        device: str,
        keeps: Keeps,
        compiled: bool = False,
    ) -> None:
        self.body, self.head, self.device = list(body), head, device
        self.weights = {name: _tensorflow_variable(weight) for name, weight in weights.items()}
        blocks = [*body, head] if head is not None else list(body)
        self.reads = sorted({column for block in blocks for column in block.READS})
        with tf.device(device):
            self.accumulators = {
                name: tf.Variable(tf.zeros(weight.shape, tf.float32), trainable=False)
                for name, weight in self.weights.items()
            }
        self.empty = True
        """Whether what the accumulators hold is of no use: the next gradient is put there, not added."""
        self.keeps, self.compiled = keeps, compiled
        # What is run again under one tape.
        self.segments = [[block] for block in body] if keeps == "layer" else [list(body)]
        self.sum_names: list[str] = []
        self._run = AlikeBlocks(self.body).run
        self._forward_only = traced(self._run_body, compiled)
        self._forward_inputs = traced(self._forward_and_inputs, compiled)
        self._backward_again = traced(self._compute_again, compiled)
        self._add = traced(self._add_all, compiled)
        self._turn = traced(self._forward_and_backward, compiled)
        self._sums = traced(self._evaluate_head)
        # Batches of many lengths come one after another: one trace for all of them, not one for each.
        self._scores = traced(self._score, any_length=True)

    def columns(self, micro_batch: Columns) -> Tensors:
        """The columns that this stage reads, those there are, on its device: a test set has no labels."""
        with tf.device(self.device):
            here = (name for name in self.reads if name in micro_batch)
            return {name: tf.convert_to_tensor(micro_batch[name]) for name in here}

    def forward(self, hidden: Any, columns: Tensors, key: tf.Tensor) -> tuple[Any, Any]:
        """Hidden values for the next stage, and what `backward` needs; not for the last stage."""
        with tf.device(self.device):
            hidden = _here(hidden)
            if self.keeps != "all":
                return self._forward_inputs(hidden, columns, key)
            with tf.GradientTape() as tape:
                if hidden is not None:
                    tape.watch(hidden)
                onward = self._forward_only(hidden, columns, key)
            return onward, (tape, hidden, onward)

    def backward(self, kept: Any, columns: Tensors, key: tf.Tensor, above: Any) -> Any:
        """Add the gradients of one micro-batch; the gradient for the stage before, or None."""
        with tf.device(self.device):
            above = _here(above)
            if self.keeps != "all":
                return self._backward_again(kept, columns, key, above, self._now_filled())
            tape, hidden, onward = kept
            below, found = self._pull(tape, onward, hidden, above)
            self._add(found, self._now_filled())
            return below

    def turn(
        self, hidden: Any, columns: Tensors, key: tf.Tensor, counts: Tensors, scale: tf.Tensor
    ) -> tuple[Any, tf.Tensor]:
        """Forward, loss and backward of the last stage; the gradient below and the head's sums."""
        with tf.device(self.device):
            return self._turn(_here(hidden), columns, key, counts, scale, self._now_filled())

    def look(self, hidden: Any, columns: Tensors) -> Any:
        """Forward without dropout and gradients: hidden values, or in the last stage the sums."""
        with tf.device(self.device):
            hidden = _here(hidden)
            if self.head is None:
                return self._forward_only(hidden, columns, None)
            return self._sums(hidden, columns)

    def scores(self, hidden: Any, columns: Tensors) -> Any:
        """The head's logits, in the last stage, without dropout; it is given no labels."""
        with tf.device(self.device):
            return self._scores(_here(hidden), columns)

    def clear(self) -> None:
        """Forget all gradients."""
        self.empty = True

    def _now_filled(self) -> tf.Tensor:
        """Whether the gradient that now comes is the first, which is put down; the next one is not."""
        # Where it is looked at: on a device, the host would wait for it.
        with tf.device("CPU:0"):
            is_first, self.empty = tf.constant(self.empty), False
        return is_first

    def _run_body(self, hidden: Any, columns: Tensors, key: Any) -> Any:
        for block in self.body:
            hidden = self._run(block, hidden, columns, key)
        return hidden

    def _forward_and_inputs(self, hidden: Any, columns: Tensors, key: Any) -> tuple[Any, list[Any]]:
        inputs = []
        for segment in self.segments:
            inputs.append(hidden)
            # A key that waits for the block's input: else all masks are drawn at once, and kept for
            # the second time (measured: 1,191 MB instead of 860 on five layers of width 256).
            with tf.control_dependencies([] if hidden is None else [tf.identity(hidden)]):
                own = tf.identity(key)
            for block in segment:
                hidden = self._run(block, hidden, columns, own)
        return hidden, inputs

    def _compute_again(
        self,
        inputs: Sequence[Any],
        columns: Tensors,
        key: Any,
        above: Any,
        is_first: tf.Tensor,
        summed: Set[str] = frozenset(),
    ) -> Any:
        """`summed` are the names of weights that the micro-batch already has a gradient for."""
        for segment, given in zip(reversed(self.segments), reversed(inputs), strict=True):
            # Without the dependency all segments would be run again at once, and within a turn the
            # graph optimizer would see that this is the forward pass once more: either way every
            # activation would be alive after all. An identity, because nothing waits for a call of a
            # function itself, only for its side effects.
            with tf.control_dependencies([tf.identity(above)]):
                given = _here(given)
                held = {name: tf.identity(column) for name, column in columns.items()}
                own = tf.identity(key)
            with tf.GradientTape() as tape:
                if given is not None:
                    tape.watch(given)
                hidden = given
                for block in segment:
                    hidden = self._run(block, hidden, held, own)
            above, found = self._pull(tape, hidden, given, above)
            summed = self._add_to_accumulators(found, is_first, summed)
        self._empty_others(summed)
        return above

    def _forward_and_backward(
        self,
        hidden: Any,
        columns: Tensors,
        key: Any,
        counts: Tensors,
        scale: Any,
        is_first: tf.Tensor,
    ) -> tuple[Any, tf.Tensor]:
        again = self.keeps == "layer" and bool(self.body)
        inputs: list[Any] = []
        if again:
            hidden, inputs = self._forward_and_inputs(hidden, columns, key)
        with tf.GradientTape() as tape:
            if hidden is not None:
                tape.watch(hidden)
            last = hidden if again else self._run_body(hidden, columns, key)
            loss, sums = self.head(last, columns, counts, key)  # type: ignore[misc]
            scaled = loss * scale
        below, found = self._pull(tape, scaled, hidden, None)
        summed = self._add_to_accumulators(found, is_first)
        if again:
            below = self._compute_again(inputs, columns, key, below, is_first, summed)
        else:
            self._empty_others(summed)
        return below, self._stacked(sums)

    def _evaluate_head(self, hidden: Any, columns: Tensors) -> tf.Tensor:
        ones = {name: tf.constant(1.0) for name in ("examples", *self.head.COUNTS)}  # type: ignore[union-attr]
        last = self._run_body(hidden, columns, None)
        _, sums = self.head(last, columns, ones, None)  # type: ignore[misc]
        return self._stacked(sums)

    def _score(self, hidden: Any, columns: Tensors) -> Any:
        return self.head.logits(self._run_body(hidden, columns, None), None)  # type: ignore[union-attr]

    def _stacked(self, sums: Mapping[str, Any]) -> tf.Tensor:
        self.sum_names = sorted(sums)
        return tf.stack([sums[name] for name in self.sum_names])

    def _pull(self, tape: Any, target: Any, source: Any, above: Any) -> tuple[Any, list[Any]]:
        """Gradients of the input, and of every weight (None where it has no part)."""
        weights = list(self.weights.values())
        sources = weights if source is None else [source, *weights]
        found = tape.gradient(target, sources, output_gradients=above)
        return (None, found) if source is None else (found[0], found[1:])

    def _add_to_accumulators(
        self, found: Sequence[Any], is_first: tf.Tensor, summed: Set[str] = frozenset()
    ) -> Set[str]:
        """Add gradients, or put the first of a step; the names of the weights that have one by now.

        Putting it there takes over its memory. To forget by zeros and to add to them costs the memory
        once more, since TensorFlow keeps zeros of a known shape as a constant, and a pass to copy them.
        """
        sums = {
            name: (accumulator, tf.cast(tf.convert_to_tensor(gradient), tf.float32))
            for (name, accumulator), gradient in zip(self.accumulators.items(), found, strict=True)
            if gradient is not None
        }

        def put() -> None:
            for name, (accumulator, gradient) in sums.items():
                (accumulator.assign_add if name in summed else accumulator.assign)(gradient)

        def add() -> None:
            for accumulator, gradient in sums.values():
                accumulator.assign_add(gradient)

        if self.compiled:
            # No branch, for which a GPU would have the host wait.
            for name, (accumulator, gradient) in sums.items():
                total = accumulator + gradient
                chosen = total if name in summed else tf.where(is_first, gradient, total)
                accumulator.assign(chosen)
        else:
            tf.cond(is_first, put, add)
        return summed | sums.keys()

    def _add_all(self, found: Sequence[Any], is_first: tf.Tensor) -> None:
        self._empty_others(self._add_to_accumulators(found, is_first))

    def _empty_others(self, summed: Set[str]) -> None:
        """Set to zero what LAMB left of a weight that has no part in the loss, so no gradient ever comes."""
        for name in self.accumulators.keys() - summed:
            self.accumulators[name].assign(tf.zeros_like(self.accumulators[name]))


def _tensorflow_variable(weight: Any) -> tf.Variable:
    """The variable of TensorFlow in a variable of Keras."""
    return weight.value if hasattr(weight, "path") else weight


def _here(tensor: Any) -> Any:
    """The tensor on the current device: a copy where it comes from another one."""
    return None if tensor is None else tf.identity(tensor)
