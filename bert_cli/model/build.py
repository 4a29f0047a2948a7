"""BERT as an ordered list of named blocks: emb, hid_0 .. hid_(L-1), and the last blocks of a task.

Running the model means calling the blocks in order; a pipeline stage is a slice of the list. A block can be built
alone, on the current device: the initial values of its weights follow from the seed and its name, its dropout ids from
its number.
"""

import hashlib
import inspect
import math
import pkgutil
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Unpack

import keras
import numpy as np

from bert_cli.arrays import Floats32, Shape
from bert_cli.facts import heads
from bert_cli.facts.architectures import ARCHITECTURES
from bert_cli.facts.bert import BertConfig
from bert_cli.model.arithmetic.operations import PLAIN, Operations
from bert_cli.model.arithmetic.parts import Arguments, Block

# Standard deviation of a standard normal variable truncated at two, by integration.
TRUNCATED_DEVIATION = 0.8796
# The blocks after the encoder layers, in pre-training.
PRETRAINING = heads.PRETRAINING.last_blocks


class Outputs(NamedTuple):
    """What the blocks after the encoder layers take besides the shape of the model."""

    labels: int = 2
    """Outputs of a task's head."""
    chunks: int = 1
    """Chunks of the vocabulary in the masked-LM loss."""
    word_table: keras.Variable | None = None
    """The word embeddings of `emb`, by which the masked-LM head scores the vocabulary; they do not change."""


USUAL = Outputs()


def each_block(
    config: BertConfig,
    *,
    last_blocks: Sequence[str] = PRETRAINING,
    outputs: Outputs = USUAL,
    **options: Any,
) -> Iterator[tuple[str, Block]]:
    """Yield (name, block) in running order, each block built on the current device; options of `build_block`."""
    layers = (f"hid_{number}" for number in range(config.num_hidden_layers))
    for name in ("emb", *layers, *last_blocks):
        block = build_block(name, config, outputs=outputs, **options)
        if name == "emb":
            # The masked-LM head reads this variable too. So its gradient has two parts, which the engine adds.
            outputs = outputs._replace(word_table=block.word.embeddings)
        yield name, block


def build_blocks(config: BertConfig, **options: Any) -> list[tuple[str, Block]]:
    """Build a complete model on the current device, as `each_block` does."""
    return list(each_block(config, **options))


def build_block(
    name: str,
    config: BertConfig,
    *,
    seed: int | None,
    policy: str,
    operations: Operations = PLAIN,
    outputs: Outputs = USUAL,
) -> Block:
    """Build one block, with its initial weights, on the current device; `policy` is a Keras policy.

    `operations` are those of the complete model. Without a seed the weights stay 0: for a model of shapes alone,
    or one that a file fills.
    """
    arguments = {"name": name, "policy": keras.DTypePolicy(policy), "config": config}
    block = _new_block(outputs, **arguments, operations=operations)
    if seed is None:
        return block
    factors = operations.factors
    by_path = named_weights([(name, block)]).items()
    weights = {path: weight for path, weight in by_path if path.startswith(f"{name}/")}

    def value_of(path: str) -> Floats32:
        # With Unit Scaling the truncated values have a standard deviation of 1. Without, they have 0.88 of the
        # config's deviation, as in Google's BERT.
        deviation = 1.0 / TRUNCATED_DEVIATION if factors else config.deviation_of(path)
        value = initial_value(seed, path, weights[path].shape, deviation)
        if not factors:
            return value
        return value * factors[path].deviation

    for path, weight in weights.items():
        weight.assign(value_of(path))
    return block


def _new_block(outputs: Outputs, **arguments: Unpack[Arguments]) -> Block:
    """Return a block whose weights are 0; its class takes what it annotates of the outputs."""
    name = arguments["name"]
    config = arguments["config"]
    architecture = ARCHITECTURES[config.architecture]
    layer = pkgutil.resolve_name(architecture.layer)
    if name.startswith("hid_"):
        return layer(number=int(name.removeprefix("hid_")), **arguments)
    if name == "emb":
        return pkgutil.resolve_name(architecture.embeddings)(**arguments)
    block_class: Any = pkgutil.resolve_name(architecture.last_blocks[name].layer)
    # Id 0 belongs to the embeddings, and each layer has its own after it.
    dropout_id = 1 + layer.DROPOUT_IDS * config.num_hidden_layers
    options = {**outputs._asdict(), "dropout_id": dropout_id}
    taken: set[str] = set()
    for base in block_class.__mro__:
        taken.update(inspect.get_annotations(base))
    options = {option: value for option, value in options.items() if option in taken}
    return block_class(**options, **arguments)


def named_weights(blocks: Iterable[tuple[str, Block]]) -> dict[str, keras.Variable]:
    """Return every weight of the blocks once, by its path, in running order."""
    weights = {}
    for _, block in blocks:
        for weight in block.weights:
            weights[weight.path] = weight
    return weights


def repeated_parts(keys: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Return (length, times) of the consecutive parts of a sequence, each so many repetitions of its beginning."""
    parts = []
    first = 0
    while first < len(keys):
        best = 1, 1
        # Tries every length that can repeat: a model has some tens of layers. ModernBERT repeats three, a global one
        # and two local ones.
        for length in range(1, (len(keys) - first) // 2 + 1):
            end = first + length
            while keys[end : end + length] == keys[first : first + length]:
                end += length
            times = (end - first) // length
            if times > 1 and length * times > math.prod(best):
                best = length, times
        parts.append(best)
        first += math.prod(best)
    return parts


def initial_value(seed: int, name: str, shape: Shape, deviation: float) -> Floats32:
    """Return the initial value of a weight: a function of the run's seed and the weight's name."""
    # Kernels and tables are normal, truncated at two deviations (Devlin et al. 2019); biases and betas are 0, gammas 1.
    part = name.rpartition("/")[2]
    if part in ("bias", "beta", "gamma"):
        return np.full(shape, part == "gamma", np.float32)
    assert part in ("kernel", "embeddings"), name
    # The key of Philox has 128 bits. Two weights with one key would have the same values.
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
    values = generator.standard_normal(int(np.prod(shape)), dtype=np.float32)
    # 4.6 % of a normal's values are outside; each round of the loop leaves as small a part of them.
    outside = np.flatnonzero(np.abs(values) > 2.0)
    while outside.size:
        drawn = generator.standard_normal(outside.size, dtype=np.float32)
        values[outside] = drawn
        outside = outside[np.abs(drawn) > 2.0]
    values *= np.float32(deviation)
    return values.reshape(shape)
