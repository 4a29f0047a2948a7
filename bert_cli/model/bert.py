"""BERT as an ordered list of named blocks: emb, hid_0 .. hid_(L-1), and the last blocks of a task.

Running the model means calling the blocks in order; a pipeline stage is a slice of the list. A block can be built
alone, on the current device: the initial values of its weights follow from the seed and its name, its dropout ids from
its number.
"""

import hashlib
import inspect
import math
import pkgutil
from collections.abc import Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from bert_cli.facts import heads
from bert_cli.facts.architectures import ARCHITECTURES
from bert_cli.facts.bert import BertConfig
from bert_cli.model.fused import NEVER
from bert_cli.model.scaling import Factor
from bert_cli.processes import cpu_count

# Standard deviation of a standard normal variable truncated at two, by integration.
TRUNCATED_DEVIATION = 0.8796
# The blocks after the encoder layers, in pre-training.
PRETRAINING = heads.PRETRAINING.last_blocks


def block_names(config: BertConfig, last_blocks: Sequence[str] = PRETRAINING) -> list[str]:
    """Return the names of the blocks in running order."""
    layers = [f"hid_{layer}" for layer in range(config.num_hidden_layers)]
    return ["emb", *layers, *last_blocks]


def build_block(
    name: str,
    config: BertConfig,
    *,
    seed: int,
    policy: str,
    before: Mapping[str, keras.layers.Layer] | None = None,
    labels: int = 2,
    chunks: int = 1,
    factors: Mapping[str, Factor] | None = None,
    fuse_above: float = NEVER,
    uses_library: bool = False,
    uses_amx: bool = False,
    has_values: bool = True,
) -> keras.layers.Layer:
    """Build one block, with its initial weights, on the current device; `policy` is a Keras policy.

    A head may share weights of the blocks `before` it, by name; they do not change. `labels` is the number of outputs
    of a task's head, `chunks` of chunks of the vocabulary in the masked-LM loss, `factors` the table of Unit Scaling.
    Operations of more elements than `fuse_above` are fused; `uses_library` is for predictions, `uses_amx` for JAX on
    CPUs with AMX (see `Layer`). Without `has_values` the weights stay 0, for a model of shapes alone.
    """
    is_layer = name.startswith("hid_")
    architecture = ARCHITECTURES[config.architecture]
    layer = pkgutil.resolve_name(architecture.layer)
    options = {
        "word_table": before["emb"].word.embeddings if before else None,
        "labels": labels,
        "chunks": chunks,
        "dropout_id": 1 + layer.DROPOUT_IDS * config.num_hidden_layers,
        "number": int(name.removeprefix("hid_")) if is_layer else None,
    }
    block_class: Any = layer
    if not is_layer:
        last = architecture.last_blocks.get(name)
        block_class = pkgutil.resolve_name(last.layer if last else architecture.embeddings)
    parameters = inspect.signature(block_class.__init__).parameters
    block = block_class(
        name=name,
        policy=keras.DTypePolicy(policy),
        config=config,
        **{option: value for option, value in options.items() if option in parameters},
    )
    block.set_factors(factors or {})
    block.fuse_operations(fuse_above, uses_library=uses_library, uses_amx=uses_amx)
    if not has_values:
        return block
    by_path = named_weights([(name, block)]).items()
    weights = {path: weight for path, weight in by_path if path.startswith(f"{name}/")}

    def value_of(path: str) -> npt.NDArray[np.float32]:
        deviation = 1.0 / TRUNCATED_DEVIATION if factors else config.deviation_of(path)
        value = initial_value(seed, path, weights[path].shape, deviation)
        return value * factors[path].deviation if factors else value

    # NumPy draws without Python's lock: 1.0 s for BERT-base on two cores instead of 1.5.
    with ThreadPoolExecutor(cpu_count()) as pool:
        for weight, value in zip(weights.values(), pool.map(value_of, weights), strict=True):
            weight.assign(value)
    return block


def build_blocks(
    config: BertConfig,
    *,
    last_blocks: Sequence[str] = PRETRAINING,
    **options: Any,
) -> list[tuple[str, keras.layers.Layer]]:
    """Build a complete model on the current device: (name, block) in running order; options of `build_block`."""
    blocks: dict[str, keras.layers.Layer] = {}
    for name in block_names(config, last_blocks):
        blocks[name] = build_block(name, config, before=blocks, **options)
    return list(blocks.items())


def named_weights(blocks: Iterable[tuple[str, keras.layers.Layer]]) -> dict[str, keras.Variable]:
    """Return every weight of the blocks once, by its path, in running order."""
    return {weight.path: weight for _, block in blocks for weight in block.weights}


def repeated_parts(keys: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Return (length, times) of the consecutive parts of a sequence, each so many repetitions of its beginning."""
    parts = []
    first = 0
    while first < len(keys):
        best = 1, 1
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


def initial_value(
    seed: int, name: str, shape: tuple[int, ...], deviation: float
) -> npt.NDArray[np.float32]:
    """Return the initial value of a weight: a function of the run's seed and the weight's name.

    Kernels and tables are normal, truncated at two deviations (Devlin et al. 2019); biases and betas are 0, gammas 1.
    """
    kind = name.rpartition("/")[2]
    if kind in ("bias", "beta", "gamma"):
        return np.full(shape, kind == "gamma", np.float32)
    assert kind in ("kernel", "embeddings"), name
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
    values = generator.standard_normal(int(np.prod(shape)), dtype=np.float32)
    outside = np.flatnonzero(np.abs(values) > 2.0)
    while outside.size:
        drawn = generator.standard_normal(outside.size, dtype=np.float32)
        values[outside] = drawn
        outside = outside[np.abs(drawn) > 2.0]
    values *= np.float32(deviation)
    return values.reshape(shape)
