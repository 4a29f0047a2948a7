"""Blocks of a stage that differ by nothing but their weights: traced once, called with those of each.

TensorFlow takes some 30 ms a layer and pass to put together what one call of an encoder layer does, and
as long again for its gradient. As a function of its weights it is put together once for a stage; where
it is called the runtime sets its operations in again, before it optimizes, so what runs is what ran
without it, bit for bit. The other blocks, and a layer that is alone in its stage, run as they are.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from bert_cli.model.dropout import moved_key


def traced(method: Callable[..., Any], compiled: bool = False, any_length: bool = False) -> Any:
    """A function of TensorFlow's own for one object's method; `compiled` by XLA, or run as a graph.

    As a partial, because TensorFlow takes the methods of two objects for one function and warns that
    it is traced often. With `any_length` one trace is for arguments of all lengths, else one for each.
    """
    return tf.function(
        partial(method), autograph=False, jit_compile=compiled, reduce_retracing=any_length
    )


class AlikeBlocks:
    """Runs blocks of one stage, those alike as calls of one function."""

    def __init__(self, blocks: Sequence[Any]) -> None:
        """Learn which blocks are of one `kind`; a block that has none is like no other."""
        kinds = Counter(_kind(block) for block in blocks)
        self._firsts: dict[Hashable, Any] = {}
        for block in blocks:
            if kinds[_kind(block)] > 1:
                self._firsts.setdefault(_kind(block), block)
        self.functions: dict[Hashable, Any] = {}
        """By kind and shape. Of one function for several shapes TensorFlow would take a trace for any
        shape where there is one, and dropout needs to know its shape."""

    def run(self, block: Any, hidden: Any, columns: Mapping[str, Any], key: Any) -> Any:
        """`block(hidden, columns, key)`; within a function of TensorFlow as a call of another one."""
        first = self._firsts.get(_kind(block))
        if first is None or tf.executing_eagerly():
            return block(hidden, columns, key)
        read = {name: columns[name] for name in block.READS if name in columns}
        function = _kind(block), *hidden.shape
        if function not in self.functions:
            self.functions[function] = traced(partial(_run_with, first))
        weights = [weight.value for weight in block.weights]
        return self.functions[function](
            weights, hidden, read, moved_key(key, block.site - first.site)
        )


def _kind(block: Any) -> Hashable:
    return getattr(block, "kind", id(block))


def _run_with(first: Any, weights: Any, hidden: Any, columns: Mapping[str, Any], key: Any) -> Any:
    """What a block with these weights does, told by the first of its kind."""
    onward, _ = first.stateless_call(weights, [], hidden, columns, key)
    return onward
