"""One step's forwards and backwards, played on the devices; today the 1 x 1 mesh, one device.

The engine sees the model as an ordered list of blocks and knows nothing of what is in them. For
each micro-batch it runs the blocks forward, takes the head's loss, runs backward, and adds the
gradients to float32 accumulators. The head divides by the step's counts, so adding is all that
accumulation does, whatever the number of micro-batches. Each function is traced once.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from bert_cli.errors import DeviceError

Batch = Mapping[str, npt.NDArray[Any]]
Tensors = dict[str, tf.Tensor]


def prepare_devices(precision: str, deterministic: bool) -> str:
    """Set what TensorFlow only takes before its first operation; returns the device's name.

    Raises DeviceError when TensorFlow was started before.
    """
    try:
        for device in tf.config.list_physical_devices("GPU"):
            tf.config.experimental.set_memory_growth(device, True)
    except RuntimeError as error:
        raise DeviceError(
            f"devices: TensorFlow was started before they were set ({error}); start a new process"
        ) from error
    if deterministic:
        tf.config.experimental.enable_op_determinism()
    gpus = tf.config.list_physical_devices("GPU")
    if precision == "float16" or (precision == "mixed_float16" and not gpus):
        # Grappler fuses a float16 matmul and its bias into an operation that takes 40 ms a row on a
        # CPU: a step that looks like a hang.
        tf.config.optimizer.set_experimental_options({"remapping": False})
    return "GPU:0" if gpus else "CPU:0"


class Engine:
    """Adds up the gradients of a step's micro-batches.

    `body` are the blocks `block(hidden, batch, key) -> hidden` in order, `head` the last one,
    `head(hidden, labels, counts, key) -> loss, sums`; `weights` their variables by name.
    """

    def __init__(
        self,
        body: Sequence[Any],
        head: Any,
        weights: Mapping[str, Any],
        *,
        seed: int,
        recompute: bool,
    ) -> None:
        self.body = list(body)
        self.head = head
        self.seed = seed
        self.names = list(weights)
        self.variables = [weight.value for weight in weights.values()]
        self.accumulators = [
            tf.Variable(tf.zeros(v.shape, tf.float32), trainable=False) for v in self.variables
        ]
        gradients = self._gradients_with_recomputation if recompute else self._gradients
        self._accumulate = tf.function(self._accumulating(gradients), reduce_retracing=False)
        self._evaluate = tf.function(self._forward_sums)

    def accumulate(
        self, batch: Batch, position: int, counts: Mapping[str, float], loss_scale: float
    ) -> Tensors:
        """Add one micro-batch's gradients to the accumulators; the head's sums.

        `position` is the micro-batch's place in the stream, which decides its dropout; `counts` are
        the whole step's masked tokens and examples.
        """
        key = tf.constant(np.array([self.seed, position % 2**31], np.int32))
        scale = tf.constant(loss_scale, tf.float32)
        try:
            return self._accumulate(_tensors(batch), key, _scalars(counts), scale)
        except tf.errors.ResourceExhaustedError as error:
            raise DeviceError(
                f"global_batch.micro_batch_size ({len(batch['input_ids'])}): does not fit the device's memory; "
                "lower it and raise grad_acc_steps_per_replica, or set --parallel.recompute"
            ) from error

    def evaluate(self, batch: Batch) -> Tensors:
        """The head's sums without dropout and without gradients."""
        ones = {"masked": 1.0, "examples": 1.0}
        return self._evaluate(_tensors(batch), _scalars(ones))

    def clear(self) -> None:
        """Forget the gradients of a step that was given up half way."""
        for accumulator in self.accumulators:
            accumulator.assign(tf.zeros_like(accumulator))

    def _accumulating(self, gradients: Any) -> Any:
        def accumulate(
            batch: Tensors, key: tf.Tensor, counts: Tensors, loss_scale: tf.Tensor
        ) -> Tensors:
            found, sums = gradients(batch, key, counts, loss_scale)
            for accumulator, gradient in zip(self.accumulators, found, strict=True):
                accumulator.assign_add(tf.cast(tf.convert_to_tensor(gradient), tf.float32))
            return sums

        return accumulate

    def _forward_sums(self, batch: Tensors, counts: Tensors) -> Tensors:
        hidden = None
        for block in self.body:
            hidden = block(hidden, batch, None)
        _, sums = self.head(hidden, batch, counts, None)
        return dict(sums)

    def _gradients(
        self, batch: Tensors, key: tf.Tensor, counts: Tensors, loss_scale: tf.Tensor
    ) -> tuple[list[Any], Tensors]:
        with tf.GradientTape() as tape:
            hidden = None
            for block in self.body:
                hidden = block(hidden, batch, key)
            loss, sums = self.head(hidden, batch, counts, key)
            scaled = loss * loss_scale
        found = tape.gradient(
            scaled, self.variables, unconnected_gradients=tf.UnconnectedGradients.ZERO
        )
        return found, dict(sums)

    def _gradients_with_recomputation(
        self, batch: Tensors, key: tf.Tensor, counts: Tensors, loss_scale: tf.Tensor
    ) -> tuple[list[Any], Tensors]:
        """Keep only each block's input; run the block again when its gradient is due."""
        inputs: list[Any] = [None]
        for block in self.body:
            inputs.append(block(inputs[-1], batch, key))
        with tf.GradientTape() as tape:
            last = inputs.pop()
            tape.watch(last)
            loss, sums = self.head(last, batch, counts, key)
            scaled = loss * loss_scale
        above, found = self._pull(tape, scaled, last, None)
        for block, given in zip(reversed(self.body), reversed(inputs), strict=True):
            # Without the dependency the graph optimizer sees that this is the forward pass once
            # more, computes it once, and keeps every activation alive after all.
            with tf.control_dependencies([above]):
                given = None if given is None else tf.identity(given)
                held = {name: tf.identity(column) for name, column in batch.items()}
            with tf.GradientTape() as tape:
                if given is not None:
                    tape.watch(given)
                hidden = block(given, held, key)
            above, here = self._pull(tape, hidden, given, above)
            found = [
                new
                if old is None
                else old
                if new is None
                else tf.convert_to_tensor(old) + tf.convert_to_tensor(new)
                for old, new in zip(found, here, strict=True)
            ]
        zeros = [tf.zeros(v.shape, v.dtype) for v in self.variables]
        return [zero if one is None else one for one, zero in zip(found, zeros, strict=True)], dict(
            sums
        )

    def _pull(self, tape: Any, target: Any, source: Any, above: Any) -> tuple[Any, list[Any]]:
        """Gradients of one block: of its input, and of every weight (None where it has no part)."""
        sources = self.variables if source is None else [source, *self.variables]
        found = tape.gradient(target, sources, output_gradients=above)
        return (None, found) if source is None else (found[0], found[1:])


def _tensors(batch: Batch) -> Tensors:
    return {name: tf.convert_to_tensor(column) for name, column in batch.items()}


def _scalars(numbers: Mapping[str, float]) -> Tensors:
    return {name: tf.constant(number, tf.float32) for name, number in numbers.items()}
