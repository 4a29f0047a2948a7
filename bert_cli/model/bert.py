"""BERT as an ordered list of named blocks: emb, hid_0 .. hid_(L-1), and the last ones of a task.

The list is the model: running it is calling the blocks in order, cutting it is slicing it. A block
can be built alone, on whatever device is current, because nothing about it depends on the blocks
built before: its weights' names are its own, their first values are f(seed, name), its dropout sites
follow from its number. Only `heads` needs something from another block, the word table of `emb`.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence

import keras
import numpy as np
import numpy.typing as npt

from bert_cli.config.model import BertConfig
from bert_cli.model.heads import PretrainingHeads
from bert_cli.model.layers import Embeddings, EncoderLayer, MaskedPlaces, Pooler
from bert_cli.model.task_heads import (
    QuestionAnswering,
    SequenceClassification,
    TokenClassification,
)

# Policy of each precision: dtype of the variables / of the matrix products.
POLICIES = ("float32", "mixed_float16", "mixed_bfloat16", "float16")
# The blocks after the encoder layers, in pre-training.
PRETRAINING = ("enc_out", "pool", "heads")
TASK_HEADS: dict[str, Callable[..., keras.layers.Layer]] = {
    "qa_head": QuestionAnswering,
    "glue_head": SequenceClassification,
    "token_head": TokenClassification,
}


def block_names(config: BertConfig, last_blocks: Sequence[str] = PRETRAINING) -> list[str]:
    """The names of the blocks in the order in which they run."""
    layers = [f"hid_{layer}" for layer in range(config.num_hidden_layers)]
    return ["emb", *layers, *last_blocks]


def build_block(
    name: str,
    config: BertConfig,
    *,
    seed: int,
    policy: str,
    word_table: keras.Variable | None = None,
    labels: int = 2,
    chunks: int = 1,
) -> keras.layers.Layer:
    """Build one block, with its first weights, on the device that is current.

    `policy` is one of `POLICIES`. `word_table` is that of `emb` (see `word_table`); only `heads`
    takes it. The heads' weights then include it, but its value is left as it is. `labels` are the
    outputs of a task's head, `chunks` those of the vocabulary in the masked-LM loss.
    """
    known = block_names(config, (*PRETRAINING, *TASK_HEADS))
    if name not in known:
        raise ValueError(f"block ({name}): none of {', '.join(known)}")
    if (name == "heads") != (word_table is not None):
        raise ValueError(f"block ({name}): the word table goes to heads, and only there")
    dtype = keras.DTypePolicy(policy)
    block: keras.layers.Layer
    if name == "emb":
        block = Embeddings(config, name=name, policy=dtype, site=0)
    elif name == "enc_out":
        block = MaskedPlaces(name=name, policy=dtype)
    elif name == "pool":
        block = Pooler(config, name=name, policy=dtype)
    elif name == "heads":
        block = PretrainingHeads(config, word_table, name=name, policy=dtype, chunks=chunks)
    elif name in TASK_HEADS:
        site = 1 + EncoderLayer.SITES * config.num_hidden_layers
        block = TASK_HEADS[name](config, name=name, policy=dtype, site=site, labels=labels)
    else:
        site = 1 + EncoderLayer.SITES * int(name.removeprefix("hid_"))
        block = EncoderLayer(config, name=name, policy=dtype, site=site)
    for path, weight in named_weights([(name, block)]).items():
        if path.startswith(f"{name}/"):
            weight.assign(initial_value(seed, path, weight.shape, config.initializer_range))
    return block


def build_blocks(
    config: BertConfig,
    *,
    seed: int,
    policy: str,
    last_blocks: Sequence[str] = PRETRAINING,
    labels: int = 2,
) -> list[tuple[str, keras.layers.Layer]]:
    """Build a whole model on the current device: (name, block) in running order."""
    blocks: list[tuple[str, keras.layers.Layer]] = []
    for name in block_names(config, last_blocks):
        table = word_table(blocks[0][1]) if name == "heads" else None
        block = build_block(name, config, seed=seed, policy=policy, word_table=table, labels=labels)
        blocks.append((name, block))
    return blocks


def word_table(emb: keras.layers.Layer) -> keras.Variable:
    """The weight that block `emb` shares with `heads`."""
    return emb.word.embeddings


def named_weights(blocks: Iterable[tuple[str, keras.layers.Layer]]) -> dict[str, keras.Variable]:
    """Every weight of the blocks once, by its path, in running order.

    The word table stands under `emb/word/embeddings`, also in a list that has `heads` alone.
    """
    named: dict[str, keras.Variable] = {}
    for _, block in blocks:
        for weight in block.weights:
            if named.setdefault(weight.path, weight) is not weight:
                raise ValueError(f"weight ({weight.path}): two weights have this name")
    return named


def initial_value(
    seed: int, name: str, shape: tuple[int, ...], deviation: float
) -> npt.NDArray[np.float32]:
    """First value of a weight: a function of the run's seed and the weight's name alone.

    Kernels and tables are drawn from a normal distribution of standard deviation `deviation`, cut
    off at two of them (as Devlin et al. 2019 did); biases and betas are 0, gammas 1.
    """
    kind = name.rpartition("/")[2]
    if kind in ("bias", "beta"):
        return np.zeros(shape, np.float32)
    if kind == "gamma":
        return np.ones(shape, np.float32)
    if kind not in ("kernel", "embeddings"):
        raise ValueError(f"weight ({name}): no first value is known for a {kind}")
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
    values = generator.standard_normal(int(np.prod(shape)), dtype=np.float32)
    while (outside := np.flatnonzero(np.abs(values) > 2.0)).size:
        values[outside] = generator.standard_normal(outside.size, dtype=np.float32)
    return (values * np.float32(deviation)).reshape(shape)
