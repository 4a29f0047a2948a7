"""Convert our weights to Hugging Face's names and back, with one table of names.

PyTorch also stores kernels as [outputs, inputs]. Dtypes are not converted, so a round trip is exact. A tensor without a
counterpart on either side is an error, except for buffers of position numbers, copies of tied weights, and heads that a
published encoder does not have.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from bert_cli.arrays import Array, Shape, Tensors
from bert_cli.errors import CheckpointError
from bert_cli.facts.architectures import ARCHITECTURES, Part, head_of_class
from bert_cli.facts.bert import BertConfig
from bert_cli.facts.heads import PRETRAINING, Head
from bert_cli.files import JSONObject
from bert_cli.model.names import published

# Last part of our name, or of an old Hugging Face name -> of Hugging Face's name. Only kernels are transposed.
LEAVES = {
    "kernel": "weight",
    "bias": "bias",
    "embeddings": "weight",
    "gamma": "weight",
    "beta": "bias",
}


# Entries of a config.json that change the arithmetic of a model, unless their value is empty.
SWITCHES = (
    *("is_decoder", "add_cross_attention", "is_encoder_decoder", "pruned_heads", "adapters"),
    *("quantization_config", "rope_scaling", "use_rotary_embeddings", "use_relative_positions"),
)


def part_of(name: str, config: BertConfig) -> Part:
    """Return the name of Hugging Face's tensor of our weight, and the weight's part of a fused tensor."""
    path, _, leaf = name.rpartition("/")
    number = re.match(r"hid_(\d+)/", path)
    row = re.sub(r"^hid_\d+/", "hid_{}/", path)
    parts = ARCHITECTURES[config.architecture].parts
    # The longest known beginning of the path; what follows has the same name on both sides.
    start = max((known for known in parts if f"{row}/".startswith(f"{known}/")), key=len)
    rest = row.removeprefix(start).replace("/", ".")
    layer_number = number[1] if number else ""
    layer = parts[start].layer.format(layer_number)
    return parts[start]._replace(layer=f"{layer}{rest}.{LEAVES[leaf]}")


def to_hf(weights: Tensors, config: BertConfig) -> dict[str, Array]:
    """Return our weights under Hugging Face's names and in its layout, in the same dtype."""
    tensors: dict[str, dict[int, Array]] = {}
    for name, value in weights.items():
        part = part_of(name, config)
        tensors.setdefault(part.layer, {})[part.number] = _transposed(name, value)
    return {name: _join(parts) for name, parts in tensors.items()}


def from_hf(
    tensors: Tensors,
    shapes: Mapping[str, Shape],
    config: BertConfig,
    *,
    where: str = "weights",
) -> tuple[dict[str, Array], list[str]]:
    """Return the `shapes` weights (our name -> shape), and the optional parts that the file lacks completely.

    Raises CheckpointError that names tensors without a weight, missing weights, other shapes, or other tied copies.
    """
    theirs = _current_names(tensors, config, where)
    parts = {name: part_of(name, config) for name in shapes}
    missing_parts = []
    # A part is there completely or not at all; half a head is a damaged file.
    for optional in _optional_parts(config):
        within = [name for name in parts if name.startswith(optional)]
        if within and not any(parts[name].layer in theirs for name in within):
            missing_parts.append(optional)
            parts = {name: part for name, part in parts.items() if name not in within}
    tensor_names = [part.layer for part in parts.values()]
    values = {
        name: _transposed(name, _split(theirs[part.layer], part))
        for name, part in parts.items()
        if part.layer in theirs
    }
    problems = {
        "have another shape": [
            f"{parts[name].layer} ({value.shape} there, {tuple(shapes[name])} here as {name})"
            for name, value in values.items()
            if value.shape != tuple(shapes[name])
        ],
        "are missing": [name for name in dict.fromkeys(tensor_names) if name not in theirs],
        "fit no weight of the model": [name for name in theirs if name not in tensor_names],
    }
    listed = []
    for what, names in problems.items():
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        if names:
            listed.append(f"{len(names)} tensors {what}: {', '.join(sorted(names)[:8])}{more}")
    if listed:
        raise CheckpointError(where, "; ".join(listed), "use the bert_config of these weights")
    return values, missing_parts


def fitting(
    tensors: Tensors, shapes: Mapping[str, Shape], config: BertConfig
) -> tuple[dict[str, Array], list[str]]:
    """Return the tensors without heads that this model lacks or has for other labels, and the names of these heads."""
    theirs = {}
    for name, shape in shapes.items():
        layer, _, number = part_of(name, config)
        # PyTorch's layout: kernels are [outputs, inputs], and a fused tensor has its parts below one another.
        rows, *others = shape[::-1] if name.endswith("/kernel") else shape
        theirs[layer] = (number * rows, *others)
    copies = ARCHITECTURES[config.architecture].hf_copies
    left_out: list[str] = []
    for part in dict.fromkeys(_optional_parts(config).values()):
        bare = part.removeprefix(f"{_base(config)}.")  # as in the file of an encoder alone
        for start in dict.fromkeys((part, bare)):
            within = [n for n in tensors if n.startswith(f"{start}.") and n not in copies]
            full = {name: part + name.removeprefix(start) for name in within}
            if any(theirs.get(full[name]) != tensors[name].shape for name in within):
                left_out.append(start)
    prefixes = tuple(f"{part}." for part in left_out)
    return {n: value for n, value in tensors.items() if not n.startswith(prefixes)}, left_out


def hf_config(
    config: BertConfig,
    *,
    dtype: str = "float32",
    head: Head = PRETRAINING,
    label_names: Sequence[str] | None = None,
) -> JSONObject:
    """Return the contents of `config.json`; `head` is the last block, a classifier without names a regression."""
    described = {
        **class_entries(config, ARCHITECTURES[config.architecture].class_name(head)),
        **config.to_hf(),
        "pad_token_id": 0,
        "tie_word_embeddings": True,
        "dtype": dtype,
    }
    if head.has_label_names:
        names = label_names or ["score"]
        described["id2label"] = {str(number): name for number, name in enumerate(names)}
        described["label2id"] = {name: number for number, name in enumerate(names)}
        if label_names is None:
            described["problem_type"] = "regression"
    return described


def class_of(tensors: Tensors, config: BertConfig) -> JSONObject:
    """Return the entries of a `config.json` for the class of a model, found by the parts in its file."""
    # As in transformers, a classifier beside a pooler is for texts, and one without a pooler for tokens.
    architecture = ARCHITECTURES[config.architecture]
    parts = _optional_parts(config)
    has = {ours for ours, part in parts.items() if any(n.startswith(f"{part}.") for n in tensors)}
    for head in architecture.heads.values():
        if head.needs and has.issuperset(head.needs):
            name = head.hf_classes[0 if has.issuperset(head.parts) else -1]
            entries: JSONObject = {"architectures": [architecture.hf_prefix + name]}
            if "classifier.weight" in tensors:
                entries["num_labels"] = len(tensors["classifier.weight"])
            return entries
    return {"architectures": [f"{architecture.hf_prefix}BertModel"]}


def class_entries(config: BertConfig, name: str) -> JSONObject:
    """Return the entries of a `config.json` that select the class `name`, also in a file of `class_files`."""
    architecture = ARCHITECTURES[config.architecture]
    entries: JSONObject = {"architectures": [name], "model_type": config.architecture}
    if architecture.hf_modeling:
        classes = [head.hf_classes[0] for head in architecture.heads.values()]
        tasks = ["ForMaskedLM", *(name.removeprefix("Bert") for name in classes if "For" in name)]
        start = f"{architecture.hf_modeling}.{architecture.hf_prefix}Bert"
        entries["auto_map"] = {"AutoConfig": f"{start}Config", "AutoModel": f"{start}Model"}
        entries["auto_map"] |= {f"AutoModel{task}": start + task for task in tasks}
        # transformers chooses BERT's by its model_type.
        entries["tokenizer_class"] = "BertTokenizer"
    head = head_of_class(name)
    if head is not None and head.hf_modeling is not None:
        module, opens = head.hf_modeling
        entries["auto_map"] = {opens: f"{module}.{name}"}
    return entries


def class_files(config: BertConfig, head: Head | None = None) -> dict[str, bytes]:
    """Return the files with the classes of a model with this head that transformers does not have, by name."""
    module = ARCHITECTURES[config.architecture].hf_modeling
    if head is not None and head.hf_modeling is not None:
        module, _ = head.hf_modeling
    if not module:
        return {}
    path = Path(__file__).parents[1] / f"{module}.py"
    return {path.name: path.read_bytes()}


def config_of(described: JSONObject, *, where: str = "config.json") -> BertConfig:
    """Return the shape of the model that a `config.json` describes.

    Raises CheckpointError for a model that cannot be built: no BERT, another activation, relative positions, SWITCHES.
    """
    for name in SWITCHES:
        if described.get(name):
            raise CheckpointError(
                f"{where} ({name} {described[name]!r})",
                "makes it another model than an encoder of this tool",
                "use another model, or correct it if the weights were trained without",
            )
    kind = described.get("model_type", "bert")
    if kind not in ARCHITECTURES:
        known = ", ".join((*ARCHITECTURES, *published.TYPES))
        problem = "is not a supported model type"
        raise CheckpointError(f"{where} (model_type {kind})", problem, f"use one of {known}")
    shape = ARCHITECTURES[kind].shape
    try:
        return shape.model_validate({**shape.from_hf(described), "architecture": kind})
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        where = f"{where} ({name} {first['input']!r})" if name else where
        message = first["msg"].removeprefix("Value error, ")
        raise CheckpointError(where, f"this model cannot be run: {message}") from error


def check_hf_config(
    described: JSONObject, config: BertConfig, *, where: str = "config.json"
) -> None:
    """Raise CheckpointError for weights of another model; settings of training alone, such as dropout, may differ."""
    architecture = described.get("model_type", "bert")
    known = ARCHITECTURES.get(architecture)
    values = known.shape.from_hf(described) if known else {}
    there = {**dict(type(config)()), **values, "architecture": architecture}
    differing = [
        f"{key} is {there[key]!r} there and {ours!r} here"
        for key, ours in config
        if key not in config.TRAINING_ONLY and there[key] != ours
    ]
    if differing:
        problem = f"describes another model: {'; '.join(differing)}"
        raise CheckpointError(where, problem, "use the same bert_config")


def vocabulary_tensors(config: BertConfig) -> tuple[str, ...]:
    """Return the ends of the names of tensors with a row for each piece of the vocabulary."""
    architecture = ARCHITECTURES[config.architecture]
    blocks = architecture.last_blocks.items()
    biases = [f"{name}/masked_lm/bias" for name, block in blocks if block.reads_word_table]
    names = [part_of(name, config).layer for name in ("emb/word/embeddings", *biases)]
    return tuple(
        name.removeprefix(f"{_base(config)}.") for name in (*names, *architecture.hf_copies)
    )


def _current_names(tensors: Tensors, config: BertConfig, where: str) -> dict[str, Array]:
    """Return the tensors under their full current names, without buffers and copies of tied weights."""
    base = _base(config)
    layers = [part.layer for part in ARCHITECTURES[config.architecture].parts.values()]
    firsts = {layer.split(".")[1] for layer in layers if layer.startswith(f"{base}.")}
    renamed: dict[str, Array] = {}
    for name, value in tensors.items():
        if name.endswith("embeddings.position_ids"):
            continue
        stem, _, leaf = name.rpartition(".")
        current = f"{stem}.{LEAVES.get(leaf, leaf)}"
        # An encoder's file lacks the prefix that files of complete models have.
        if current.partition(".")[0] in firsts:
            current = f"{base}.{current}"
        renamed[current] = value
    for copy, original in ARCHITECTURES[config.architecture].hf_copies.items():
        if copy not in renamed:
            continue
        value = renamed.pop(copy)
        # A copy that differs is another model: untied weights would be lost without a word.
        if not np.array_equal(renamed.setdefault(original, value), value):
            problem = f"differs from {original}, which is the same weight in this model"
            raise CheckpointError(f"{copy} ({where})", problem, "use a model with tied weights")
    return renamed


def _base(config: BertConfig) -> str:
    """Return the beginning of the names of the encoder in the file of a model with a head."""
    return ARCHITECTURES[config.architecture].parts["emb/word"].layer.partition(".")[0]


def _optional_parts(config: BertConfig) -> dict[str, str]:
    """Return the parts that a file may lack (its weights are then as they were built): our name -> Hugging Face's."""
    blocks = ARCHITECTURES[config.architecture].last_blocks.values()
    parts: dict[str, str] = {}
    for block in blocks:
        parts |= block.parts
    return parts


def _join(parts: Mapping[int, Array]) -> Array:
    """Return the tensor that consists of parts, by their numbers."""
    ordered = [parts[number] for number in range(len(parts))]
    if len(ordered) == 1:
        return ordered[0]
    return np.concatenate(ordered)


def _split(value: Array, part: Part) -> Array:
    """Return a part of a tensor, or a tensor that has no such parts."""
    if part.of == 1 or len(value) % part.of:
        return value
    return np.split(value, part.of)[part.number]


def _transposed(name: str, value: Array) -> Array:
    if name.endswith("/kernel"):
        return value.T
    return value
