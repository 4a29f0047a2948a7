"""Blocks of a stage that differ by nothing but their weights: traced once, called with those of each.

TensorFlow takes some 30 ms a layer and pass to put together what one call of an encoder layer does, and
as long again for its gradient. As a function of its weights it is put together once for a stage; where
it is called the runtime sets its operations in again, before it optimizes, so what runs is what ran
without it, bit for bit. The other blocks, and a layer that is alone in its stage, run as they are.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from bert_cli.model.dropout import moved_key


class Runner:
    """Runs blocks of one stage, `runner(block, hidden, columns, key) -> hidden`."""

    def __init__(self, blocks: Sequence[Any]) -> None:
        """Learn which blocks are of one `kind`; a block that has none is like no other."""
        kinds = Counter(_kind(block) for block in blocks)
        self._firsts: dict[Hashable, Any] = {}
        for block in blocks:
            if kinds[_kind(block)] > 1:
                self._firsts.setdefault(_kind(block), block)
        self._functions = {
            kind: tf.function(partial(_run, first), autograph=False, reduce_retracing=True)
            for kind, first in self._firsts.items()
        }

    def __call__(self, block: Any, hidden: Any, columns: Mapping[str, Any], key: Any) -> Any:
        """Run one of the blocks; within a function of TensorFlow as a call of another one."""
        kind = _kind(block)
        if kind not in self._functions or tf.executing_eagerly():
            return block(hidden, columns, key)
        read = {name: columns[name] for name in block.READS if name in columns}
        weights = [weight.value for weight in block.weights]
        own = moved_key(key, block.site - self._firsts[kind].site)
        return self._functions[kind](weights, hidden, read, own)


def _kind(block: Any) -> Hashable:
    return getattr(block, "kind", id(block))


def _run(first: Any, weights: Any, hidden: Any, columns: Mapping[str, Any], key: Any) -> Any:
    """What a block with these weights does, told by the first of its kind."""
    onward, _ = first.stateless_call(weights, [], hidden, columns, key)
    return onward
