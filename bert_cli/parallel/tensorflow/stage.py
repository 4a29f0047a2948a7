"""A stage: consecutive blocks on one device, as tf.functions for the forward and the backward pass.

The backward pass adds the gradients of the weights to float32 accumulators on the stage's device. The last stage runs
forward, loss and backward in one function. Each function is traced once for any number of micro-batches. Saved
for the backward pass are all activations (a gradient tape), or only the inputs of the blocks, from which the other
activations are computed again.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from itertools import chain

import tensorflow as tf

from bert_cli.model.arithmetic.fused import shifted_key
from bert_cli.model.arithmetic.parts import Block
from bert_cli.model.bert.heads import Head
from bert_cli.parallel.engine import Batch, Tensor
from bert_cli.parallel.tensorflow.mesh import traced

Tensors = dict[str, Tensor]
# The values of a forward pass that the backward pass reads.
Saved = Tensor


class SharedTraces:
    """Runs the blocks of a stage; blocks with equal trace keys share a trace, 30 ms for an encoder layer."""

    # The runtime inlines the calls before it optimizes, so the result equals that of separate traces, bit for bit.

    def __init__(self, blocks: Sequence[Block]) -> None:
        many = Counter(block.trace_key for block in blocks)
        self._first = {
            block.trace_key: block for block in reversed(blocks) if many[block.trace_key] > 1
        }
        # By key and shape: a function for several shapes would be traced for unknown shapes, but dropout needs them.
        self.functions: dict[Hashable, Callable[..., Tensor]] = {}

    def run(self, block: Block, hidden: Tensor, columns: Tensors, key: Tensor) -> Tensor:
        """Return `block(hidden, columns, key)`."""
        first = self._first.get(block.trace_key)
        if first is None or tf.executing_eagerly():
            return block(hidden, columns, key)
        read = {name: columns[name] for name in block.READS if name in columns}
        function = block.trace_key, *hidden.shape
        if function not in self.functions:
            self.functions[function] = traced(first.stateless_call)
        weights = [weight.value for weight in block.weights]
        # The first block's dropout ids with a shifted key draw the masks of this block.
        key = shifted_key(key, block.dropout_id - first.dropout_id)
        output, _ = self.functions[function](weights, [], hidden, read, key)
        return output


class Stage:
    """The blocks of a stage, their gradient accumulators, and the functions that run them.

    `body` are blocks `block(hidden, batch, key) -> hidden`; `head`, in the last stage, is `head(hidden, labels,
    counts, key) -> loss, sums`. `weights` are the variables by name. With `compiled` XLA compiles the functions.
    """

    def __init__(
        self,
        body: Sequence[Block],
        head: Head | None,
        weights: Mapping[str, tf.Variable],
        *,
        device: str,
        recomputes: bool = False,
        compiled: bool = False,
    ) -> None:
        self.body = list(body)
        self.head = head
        self.device = device
        self.weights = {}
        for name, weight in weights.items():
            # Also a weight that another stage has: each stage adds to its own accumulator, so that two threads never
            # write one.
            is_of_keras = hasattr(weight, "path")  # whose variable wraps TensorFlow's
            self.weights[name] = weight.value if is_of_keras else weight
        blocks = list(body)
        if head is not None:
            blocks.append(head)
        self.reads = sorted({*chain.from_iterable(block.READS for block in blocks)})
        with tf.device(device):
            self.accumulators = {
                name: tf.Variable(tf.zeros(weight.shape, tf.float32), trainable=False)
                for name, weight in self.weights.items()
            }
        # Whether the accumulators hold gradients of this step; if not, the next gradients overwrite them.
        self.has_gradients = False
        self.recomputes = recomputes
        self.compiled = compiled
        self.run_block = SharedTraces(self.body).run
        self.trace_functions()

    def trace_functions(self) -> None:
        """Make the tf.functions, without the traces of earlier ones."""
        self._forward = traced(self._run_body, self.compiled)
        self._forward_saving_inputs = traced(self._run_saving_inputs, self.compiled)
        self._recompute_backward = traced(self._recompute, self.compiled)
        self._accumulate = traced(self._accumulate_all, self.compiled)
        self._forward_backward = traced(self._run_last_stage, self.compiled)
        self._sums = traced(self._evaluate_head)
        # Consecutive batches have many lengths: one trace for all lengths.
        self._logits = traced(self._compute_logits, any_length=True)
        self._training_logits = traced(self._compute_logits, self.compiled)

    def columns(self, micro_batch: Batch) -> Tensors:
        """Return the columns that this stage reads, on its device. A test set has no labels."""
        with tf.device(self.device):
            # Only these go to the device: most stages read the mask alone.
            present = (name for name in self.reads if name in micro_batch)
            return {name: tf.convert_to_tensor(micro_batch[name]) for name in present}

    def forward(self, hidden: Tensor, columns: Tensors, key: Tensor) -> tuple[Tensor, Saved]:
        """Return the hidden values for the next stage, and the saved activations; not for the last stage."""
        with tf.device(self.device):
            hidden = _on_this_device(hidden)
            if self.recomputes:
                return self._forward_saving_inputs(hidden, columns, key)
            with tf.GradientTape() as tape:
                tape.watch([] if hidden is None else hidden)
                output = self._forward(hidden, columns, key)
            return output, (tape, hidden, output)

    def backward(self, saved: Saved, columns: Tensors, key: Tensor, gradient: Tensor) -> Tensor:
        """Accumulate the gradients of a micro-batch; return the gradient of the stage's input (None: first stage)."""
        with tf.device(self.device):
            gradient = _on_this_device(gradient)
            if self.recomputes:
                return self._recompute_backward(saved, columns, key, gradient, self._is_first())
            tape, hidden, output = saved
            below, gradients = self._gradients(tape, output, hidden, gradient)
            self._accumulate(gradients, self._is_first())
            return below

    def forward_backward(
        self, hidden: Tensor, columns: Tensors, key: Tensor, counts: Tensors, loss_scale: Tensor
    ) -> tuple[Tensor, Tensors]:
        """Run the last stage: return the gradient of its input, and the head's sums."""
        with tf.device(self.device):
            hidden = _on_this_device(hidden)
            is_first = self._is_first()
            return self._forward_backward(hidden, columns, key, counts, loss_scale, is_first)

    def infer(self, hidden: Tensor, columns: Tensors, key: Tensor = None) -> Tensor:
        """Return the hidden values, or in the last stage the head's sums by name; dropout needs a key."""
        with tf.device(self.device):
            hidden = _on_this_device(hidden)
            if self.head is None:
                return self._forward(hidden, columns, key)
            return self._sums(hidden, columns)

    def logits(self, hidden: Tensor, columns: Tensors, key: Tensor = None) -> Tensor:
        """Return the head's logits, in the last stage; dropout needs a key."""
        with tf.device(self.device):
            if key is None:
                function = self._logits
            else:
                function = self._training_logits
            return function(_on_this_device(hidden), columns, key)

    def _is_first(self) -> Tensor:
        """Return whether the next gradients are the first of the step, and note that gradients exist."""
        # On the CPU, where tf.cond reads it: the host would wait for a value on a GPU.
        with tf.device("CPU:0"):
            is_first = tf.constant(not self.has_gradients)
            self.has_gradients = True
        return is_first

    def _run_body(self, hidden: Tensor, columns: Tensors, key: Tensor) -> Tensor:
        for block in self.body:
            hidden = self.run_block(block, hidden, columns, key)
        return hidden

    def _run_saving_inputs(
        self, hidden: Tensor, columns: Tensors, key: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the output and the input of each block."""
        inputs = []
        for block in self.body:
            inputs.append(hidden)
            # Otherwise TensorFlow draws and stores the dropout masks of all blocks first.
            # The first block reads token ids, so it has nothing to wait for.
            before = [] if hidden is None else [tf.identity(hidden)]
            with tf.control_dependencies(before):
                block_key = tf.identity(key)
            hidden = self.run_block(block, hidden, columns, block_key)
        return hidden, inputs

    def _recompute(
        self,
        inputs: Sequence[Tensor],
        columns: Tensors,
        key: Tensor,
        gradient: Tensor,
        is_first: Tensor,
        accumulated: Set[str] = frozenset(),
    ) -> Tensor:
        """Compute the blocks again from their inputs, the last block first, and accumulate their gradients."""
        for block, saved in zip(reversed(self.body), reversed(inputs), strict=True):
            # Without this dependency TensorFlow would compute all blocks again at once, and the graph optimizer
            # would merge this with the first forward pass: all activations would be alive together. The dependency is
            # on an identity, because TensorFlow waits for a call of a tf.function only if it has side effects.
            with tf.control_dependencies([tf.identity(gradient)]):
                block_input = _on_this_device(saved)
                block_columns = {name: tf.identity(column) for name, column in columns.items()}
                block_key = tf.identity(key)
            with tf.GradientTape() as tape:
                tape.watch([] if block_input is None else block_input)
                output = self.run_block(block, block_input, block_columns, block_key)
            gradient, gradients = self._gradients(tape, output, block_input, gradient)
            accumulated = self._add(gradients, is_first, accumulated)
        self._zero_others(accumulated)
        return gradient

    def _run_last_stage(
        self,
        hidden: Tensor,
        columns: Tensors,
        key: Tensor,
        counts: Tensors,
        loss_scale: Tensor,
        is_first: Tensor,
    ) -> tuple[Tensor, Tensors]:
        recomputes = self.recomputes and bool(self.body)
        inputs: list[Tensor] = []
        if recomputes:
            hidden, inputs = self._run_saving_inputs(hidden, columns, key)
        with tf.GradientTape() as tape:
            tape.watch([] if hidden is None else hidden)
            # The blocks were run outside the tape, so it saves nothing of them.
            last = hidden
            if not recomputes:
                last = self._run_body(hidden, columns, key)
            loss, sums = self.head(last, columns, counts, key)  # type: ignore[misc]
            scaled = loss * loss_scale
        below, gradients = self._gradients(tape, scaled, hidden, None)
        accumulated = self._add(gradients, is_first)
        if recomputes:
            below = self._recompute(inputs, columns, key, below, is_first, accumulated)
        else:
            self._zero_others(accumulated)
        return below, sums

    def _evaluate_head(self, hidden: Tensor, columns: Tensors) -> Tensors:
        ones = {name: tf.constant(1.0) for name in ("examples", *self.head.COUNTS)}  # type: ignore[union-attr]
        last = self._run_body(hidden, columns, None)
        return self.head(last, columns, ones, None)[1]  # type: ignore[misc]

    def _compute_logits(self, hidden: Tensor, columns: Tensors, key: Tensor) -> Tensor:
        return self.head.logits(self._run_body(hidden, columns, key), key)  # type: ignore[union-attr]

    def _gradients(
        self, tape: Tensor, output: Tensor, hidden: Tensor, gradient: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the gradients of the input and of every weight, None for a weight that does not affect the output."""
        weights = list(self.weights.values())
        if hidden is None:  # the first stage has no input
            return None, tape.gradient(output, weights, output_gradients=gradient)
        below, *gradients = tape.gradient(output, [hidden, *weights], output_gradients=gradient)
        return below, gradients

    def _accumulate_all(self, gradients: Sequence[Tensor], is_first: Tensor) -> None:
        self._zero_others(self._add(gradients, is_first))

    def _add(
        self, gradients: Sequence[Tensor], is_first: Tensor, accumulated: Set[str] = frozenset()
    ) -> Set[str]:
        """Add gradients to the accumulators; return the names of all weights with a gradient in this micro-batch."""
        # The first gradients of a step are assigned instead, which takes over their memory: TensorFlow would store
        # zeros as a constant. The second gradient of a weight `accumulated` in this micro-batch (the word table, in the
        # embeddings and in the head) is always added.
        pairs = {
            name: (accumulator, tf.cast(tf.convert_to_tensor(gradient), tf.float32))
            for (name, accumulator), gradient in zip(
                self.accumulators.items(), gradients, strict=True
            )
            if gradient is not None
        }

        def add(overwrites: bool) -> None:
            for name, (accumulator, gradient) in pairs.items():
                assigns = overwrites and name not in accumulated
                if assigns:
                    accumulator.assign(gradient)
                else:
                    accumulator.assign_add(gradient)

        if self.compiled:
            # Compiled functions select instead of branching: a branch on a GPU makes the host wait.
            for name, (accumulator, gradient) in pairs.items():
                total = accumulator + gradient
                new = total
                if name not in accumulated:
                    new = tf.where(is_first, gradient, total)
                accumulator.assign(new)
        else:
            # Traced with both branches: one function serves the first micro-batch and the others.
            tf.cond(is_first, lambda: add(True), lambda: add(False))
        return accumulated | pairs.keys()

    def _zero_others(self, accumulated: Set[str]) -> None:
        # LAMB may have left its update direction in the accumulators.
        for name in self.accumulators.keys() - accumulated:
            self.accumulators[name].assign(tf.zeros_like(self.accumulators[name]))


def _on_this_device(tensor: Tensor) -> Tensor:
    if tensor is not None:
        return tf.identity(tensor)
    return None
