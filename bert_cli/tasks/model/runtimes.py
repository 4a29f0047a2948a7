"""Models that run without TensorFlow, which takes seconds to load and 1.9 GB of a disk: BERT in NumPy, and ONNX graphs.

The model of training is the judge: NumPy agrees with it up to rounding, and a graph as far as `bert export` measured.

Shapes: as in `opened`, N heads, H head size.
"""

import importlib.util
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
from threadpoolctl import ThreadpoolController

from bert_cli.arrays import Floats32
from bert_cli.data.finetune.labels import softmax
from bert_cli.errors import import_extra
from bert_cli.facts.bert import BertConfig
from bert_cli.facts.heads import GATHER, POOL, Head
from bert_cli.files import file_crc32c
from bert_cli.parallel.devices import visible_gpus
from bert_cli.processes import cpu_count, print_error
from bert_cli.tasks.model import models
from bert_cli.tasks.model.models import GRAPH
from bert_cli.tasks.model.opened import INPUTS, Columns, OpenedModel, head_for, head_of, labels_of

# Texts that a core computes together, so that what lies between two products fits into its cache.
AT_ONCE = 4
# Half of the coefficients of the formula, because GELU has half of erf.
ERF = tuple(
    np.float32(n / 2) for n in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
)
# Texts that NumPy has answered before TensorFlow has: 52 ms each of a core with MiniLM, instead of 37 ms after 5 s.
FEW = 300
GRAPH_FOLDER = "onnx"  # folder of an export, in the folder of its model or of the model's run
# Beside a graph that agrees with its model: what the graph was made of, and its precision.
MADE_FROM = "made_from.txt"
ENCODER = ("embeddings.", "encoder.layer.")
HEADS = ("pooler.", "cls.", "qa_outputs.", "classifier.")
# transformers' inputs [B, S] by name -> its outputs.
Graph = Callable[[Mapping[str, Any]], dict[str, Floats32]]


def _top_k(values: Floats32, number: int) -> tuple[Floats32, Any]:
    best = np.argsort(-values, axis=-1, kind="stable")[..., :number]
    return np.take_along_axis(values, best, -1), best


@dataclass(frozen=True)
class EnginelessModel(OpenedModel):
    """A model without blocks."""

    run: Callable[[Columns], Any] = dict
    """The same as `logits`."""
    ops: ClassVar[Any] = SimpleNamespace(
        **{name: getattr(np, name) for name in ("maximum", "square", "sum")},
        cast=np.asarray,
        rsqrt=lambda x: 1 / np.sqrt(x),
        softmax=partial(softmax, axis=-1),
        top_k=_top_k,
    )
    """What predictions use of `keras.ops`."""

    def logits(self, columns: Columns) -> Any:
        """Return the head's logits; without a head the encoder's output."""
        return self.run(columns)

    hidden = logits


def open_without_engine(
    source: models.Source, task: str, texts: int | None
) -> EnginelessModel | None:
    """Return what answers so many texts without an engine; None if nothing does, or an engine is worth its start."""
    path = source.exported
    if path and path.name == GRAPH and _is_for(source, task):
        import_extra("onnxruntime", "export", str(path))
        run = partial(_outputs, run_graph(path))
        return EnginelessModel(
            source, (), (), head_for(source, task), f"ONNX Runtime ({path})", run
        )
    is_few = not visible_gpus(os.environ)
    if texts:
        is_few = texts <= FEW
    if is_few:
        return open_numpy(source, task) or open_graph(source, task)
    # NumPy is slow for many texts: it answers only where no engine can.
    if importlib.util.find_spec("tensorflow"):
        return open_graph(source, task)
    return open_graph(source, task) or open_numpy(source, task)


# --- NumPy


@dataclass(frozen=True)
class Bert:
    """BERT with a head."""

    config: BertConfig
    weights: Mapping[str, Floats32]
    head: Head | None

    def __call__(self, columns: Columns) -> Any:
        """Return the encoder's output [B, S, D], or the head's logits."""
        # Threads of BLAS wait for one another busily: a core for some texts does the same in a third of the time.
        rows = range(0, len(columns["input_ids"]), AT_ONCE)
        parts = [{name: values[n : n + AT_ONCE] for name, values in columns.items()} for n in rows]
        with (
            ThreadpoolController().limit(limits=1, user_api="blas"),
            ThreadPoolExecutor(cpu_count()) as pool,
        ):
            outputs = list(pool.map(self._answer, parts))
        joined = np.concatenate(outputs)
        if self.head and self.head.fills_masks:
            return (joined,)
        return joined

    def _answer(self, columns: Columns) -> Floats32:
        hidden = self._encode(columns)
        if self.head is None:
            return hidden
        if self.head.fills_masks:
            hidden = np.take_along_axis(hidden, columns["masked_lm_positions"][:, :, None], 1)
            part = "cls.predictions.transform"
            hidden = self._norm(_gelu(self._product(hidden, f"{part}.dense")), part)
            table = self.weights["embeddings.word_embeddings.weight"]
            return hidden @ table.T + self.weights["cls.predictions.bias"]
        if POOL.name in self.head.before:
            hidden = np.tanh(self._product(hidden[:, 0], "pooler.dense"))
        return self._product(hidden, next(iter(self.head.hf_names.values())))

    def _encode(self, columns: Columns) -> Floats32:
        ids = columns["input_ids"]
        tables = {
            "word": ids,
            "token_type": columns["segment_ids"],
            "position": np.arange(ids.shape[1]),
        }
        rows = (self.weights[f"embeddings.{n}_embeddings.weight"][of] for n, of in tables.items())
        hidden_BSD = self._norm(sum(rows), "embeddings")
        is_padding_B11S = columns["input_mask"][:, None, None] == 0
        for number in range(self.config.num_hidden_layers):
            layer = f"encoder.layer.{number}"
            part = f"{layer}.attention.output"
            mixed_BSD = self._attention(hidden_BSD, is_padding_B11S, f"{layer}.attention.self")
            hidden_BSD = self._norm(hidden_BSD + self._product(mixed_BSD, f"{part}.dense"), part)
            inner_BSF = _gelu(self._product(hidden_BSD, f"{layer}.intermediate.dense"))
            output_BSD = self._product(inner_BSF, f"{layer}.output.dense")
            hidden_BSD = self._norm(hidden_BSD + output_BSD, f"{layer}.output")
        return hidden_BSD

    def _attention(self, hidden_BSD: Floats32, is_padding_B11S: Any, part: str) -> Floats32:
        shape = (*hidden_BSD.shape[:2], self.config.num_attention_heads, -1)
        query_BNSH, key_BNSH, value_BNSH = (
            self._product(hidden_BSD, f"{part}.{name}").reshape(shape).swapaxes(1, 2)
            for name in ("query", "key", "value")
        )
        scale = np.float32(query_BNSH.shape[-1] ** -0.5)
        scores_BNSS = scale * query_BNSH @ key_BNSH.swapaxes(2, 3)
        # As in the model of training: the exponential of a padded position is 0.
        scores_BNSS -= np.float32(1e9) * is_padding_B11S
        mixed_BNSH = softmax(scores_BNSS) @ value_BNSH
        return mixed_BNSH.swapaxes(1, 2).reshape(hidden_BSD.shape)

    def _product(self, inputs: Floats32, name: str) -> Floats32:
        # One product of all rows, which is faster than one for each text.
        rows = inputs.reshape(-1, inputs.shape[-1]) @ self.weights[f"{name}.weight"].T
        rows += self.weights[f"{name}.bias"]
        return rows.reshape(*inputs.shape[:-1], -1)

    def _norm(self, inputs: Floats32, name: str) -> Floats32:
        centred = inputs - inputs.mean(-1, keepdims=True)
        variance = np.square(centred).mean(-1, keepdims=True)
        scale, shift = (self.weights[f"{name}.LayerNorm.{part}"] for part in ("weight", "bias"))
        return centred / np.sqrt(variance + np.float32(self.config.layer_norm_eps)) * scale + shift


def _gelu(inputs: Floats32) -> Floats32:
    """Return GELU with an error below 2e-7 times the input: SciPy's erf takes three times as long as a whole layer."""
    # erf by Abramowitz and Stegun 1964, formula 7.1.26; in place, because a new array costs more than a product.
    size = np.abs(inputs)
    fraction = np.multiply(size, np.float32(0.3275911 / 2**0.5))
    fraction += 1
    np.reciprocal(fraction, out=fraction)
    tail = np.full_like(inputs, ERF[0])
    for coefficient in ERF[1:]:
        tail *= fraction
        tail += coefficient
    tail *= fraction
    np.square(size, out=fraction)
    fraction *= np.float32(-0.5)
    tail *= np.exp(fraction, out=fraction)
    tail *= size
    return np.maximum(inputs, 0, out=size) - tail


def open_numpy(source: models.Source, task: str) -> EnginelessModel | None:
    """Open a BERT; None for anything unusual, about which `open_model` knows more."""
    config = source.config
    head = head_for(source, task)
    before = set(head.before) if head else set()
    if type(config) is not BertConfig or not before <= {GATHER.name, POOL.name}:
        return None
    tensors = source.tensors().items()
    weights = {n.removeprefix("bert."): np.asarray(v, np.float32) for n, v in tensors}
    needed = {"embeddings.LayerNorm.bias": config.hidden_size}
    outputs = 2
    if head and head.has_label_names:
        outputs = labels_of(source)
    if head and head.fills_masks:
        needed["cls.predictions.bias"] = config.vocab_size
        needed["cls.predictions.transform.LayerNorm.bias"] = config.hidden_size
    elif head:
        needed[f"{next(iter(head.hf_names.values()))}.bias"] = outputs
        if POOL.name in head.before:
            needed["pooler.dense.bias"] = config.hidden_size
    sizes = {name: value.size for name, value in weights.items() if "position_ids" not in name}
    encoder = sum(size for name, size in sizes.items() if name.startswith(ENCODER))
    # A weight that this class does not have means another model.
    is_usual = (
        needed.items() <= sizes.items()
        and encoder == config.embedding_weights + config.num_hidden_layers * config.layer_weights
        and all(name.startswith((*ENCODER, *HEADS)) for name in sizes)
        and not (head and head.is_per_position and outputs == 1)
    )
    if not is_usual:
        return None
    return EnginelessModel(source, (), (), head, "NumPy", Bert(config, weights, head))


# --- ONNX


def run_graph(path: Path) -> Graph:
    """Return an ONNX graph as a function of transformers' inputs [B, S]."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [of.name for of in session.get_outputs()]

    def run(columns: Mapping[str, Any]) -> dict[str, Floats32]:
        inputs = {of.name: columns[of.name].astype(np.int64) for of in session.get_inputs()}
        return dict(zip(names, session.run(names, inputs), strict=True))

    return run


def _is_for(source: models.Source, task: str) -> bool:
    """Return whether a graph of the model ends where the task reads it."""
    trained = head_of(source)
    return trained is not None and bool(trained.needs) == bool(head_for(source, task))


def open_graph(source: models.Source, task: str) -> EnginelessModel | None:
    """Return the graph beside a model; None if there is none that was made from its weights for this task."""
    head = head_for(source, task)
    # A graph scores words at all positions, not at the masks alone.
    is_slow = head is not None and head.fills_masks
    if is_slow or not _is_for(source, task) or not importlib.util.find_spec("onnxruntime"):
        return None
    for folder in (source.folder / GRAPH_FOLDER, source.folder.parent / GRAPH_FOLDER):
        if (folder / MADE_FROM).is_file() and source.weights.is_file():
            made_from, _, precision = (folder / MADE_FROM).read_text().rpartition(" ")
            if made_from == made_of(source) and (folder / GRAPH).is_file():
                run = partial(_outputs, run_graph(folder / GRAPH))
                return EnginelessModel(
                    source, (), (), head, f"ONNX Runtime ({folder}, {precision})", run
                )
            # Only of a graph in the model's folder: one in the run's folder may be of another checkpoint.
            if folder.parent == source.folder:
                print_error(
                    f"warning: {folder} is not used: its model or this program has changed; export it again"
                )
    return None


def made_of(source: models.Source) -> str:
    """Return what a graph is made of: the checksum of the model's weights, and the temperature that divides logits."""
    return f"{file_crc32c(source.weights)} {source.temperature}"


def _outputs(run: Graph, columns: Columns) -> Any:
    outputs = run({name: columns[of] for name, of in INPUTS.items()})
    if "start_logits" in outputs:
        return np.stack([outputs["start_logits"], outputs["end_logits"]], -1)
    name = next(n for n in ("prediction_logits", "logits", "last_hidden_state") if n in outputs)
    if "masked_lm_positions" not in columns:
        return outputs[name]
    return (np.take_along_axis(outputs[name], columns["masked_lm_positions"][:, :, None], 1),)
