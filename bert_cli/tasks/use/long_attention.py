"""Attention of ModernBERT's ONNX graph: functions of ONNX's operators that never hold all scores of a long text.

Shapes: B examples, N heads, S positions, H head size, K blocks of W queries, T = 2 W keys of a block.
"""

from pathlib import Path
from typing import Any

import onnx
from onnxscript import graph, script
from onnxscript import opset18 as op
from onnxscript.values import Opset

from bert_cli.facts.modernbert import QUERIES
from bert_cli.model.layers import MASKED_SCORE

NAME = "bert"
DOMAIN = Opset(NAME, 1)
SHORT = QUERIES
"""Tokens up to which all pairs are scored. In blocks, 256 tokens took 1.18 times as long, 512 tokens 0.97 times."""


@script(DOMAIN, default_opset=op)
def Attended(query, keys, value, bias):
    """[..., W, H], [..., H, T], [..., T, H] and [..., W, T] -> [..., W, H]."""
    return op.MatMul(op.Softmax(op.MatMul(query, keys) + bias), value)


@script(DOMAIN, default_opset=op)
def Blocks(x, before, after, width):
    """[B, n, S, m] with zeros on both sides -> [B, n, K, W, m]."""
    padded = op.Pad(x, op.Concat([0, 0], before, [0, 0, 0], after, [0], axis=0))
    sizes = op.Concat(op.Shape(x, end=2), [-1], width, op.Shape(x, start=3), axis=0)
    return op.Reshape(padded, sizes)


@script(DOMAIN, default_opset=op)
def BlocksOfKeys(x, rest, width):
    """[B, n, S, m] -> each block with half a block on both sides [B, n, K, T, m]."""
    half = width / 2
    parts = Blocks(x, half, rest + half, width)
    right = op.Slice(parts, [1], op.Shape(parts, start=2, end=3), [2])
    return op.Concat(op.Slice(parts, [0], [-1], [2]), right, axis=3)


@script(DOMAIN, default_opset=op)
def Joined(blocks, like):
    """[B, N, K, W, H] -> [B, N, S, H] without the padding at the end."""
    sizes = op.Concat(op.Shape(like, end=2), [-1], op.Shape(like, start=3), axis=0)
    return op.Slice(op.Reshape(blocks, sizes), [0], op.Shape(like, start=2, end=3), [2])


@script(DOMAIN, default_opset=op)
def Far(queries, keys, window):
    """Positions [W] and [T] -> the mask of distances above the window [W, T]."""
    distances = op.Abs(op.Unsqueeze(queries, [1]) - keys)
    return op.Cast(distances > window, to=1) * MASKED_SCORE


@script(DOMAIN, default_opset=op)
def LocalAttention(query, key, value, is_real, width: int, short: int):
    """[B, N, S, H] and [B, 1, S, 1] -> [B, N, S, H], from half of `width` positions on both sides."""
    size = op.Constant(value_int=width)
    window = size / 2
    length = op.Shape(query, start=2, end=3)
    if length <= op.Constant(value_int=short):
        padding = op.Transpose((is_real - 1.0) * -MASKED_SCORE, perm=[0, 1, 3, 2])
        positions = op.Range(0, op.Squeeze(length), 1)
        bias = padding + Far(positions, positions, window)
        context = Attended(query, op.Transpose(key, perm=[0, 1, 3, 2]), value, bias)
    else:
        rest = op.Mod(-length, size)
        sizes = op.Unsqueeze(size, [0])
        is_real_T1 = BlocksOfKeys(is_real, rest, sizes)
        padding = op.Transpose((is_real_T1 - 1.0) * -MASKED_SCORE, perm=[0, 1, 2, 4, 3])
        far = Far(op.Range(window, size + window, 1), op.Range(0, size * 2, 1), window)
        keys = op.Transpose(BlocksOfKeys(key, rest, sizes), perm=[0, 1, 2, 4, 3])
        values = BlocksOfKeys(value, rest, sizes)
        blocks = Blocks(query, [0], rest, sizes)
        context = Joined(Attended(blocks, keys, values, padding + far), query)
    return context


@script(DOMAIN, default_opset=op)
def GlobalAttention(query, key, value, is_real, short: int):
    """[B, N, S, H] and [B, 1, S, 1] -> [B, N, S, H], for one block of `short` queries after the other."""
    keys = op.Transpose(key, perm=[0, 1, 3, 2])
    bias = op.Transpose((is_real - 1.0) * -MASKED_SCORE, perm=[0, 1, 3, 2])
    length = op.Shape(query, start=2, end=3)
    size = op.Unsqueeze(op.Constant(value_int=short), [0])
    if length <= size:
        context = Attended(query, keys, value, bias)
    else:
        blocks = Blocks(query, [0], op.Mod(-length, size), size)

        @graph()
        def of_block(number, block):
            return op.Identity(number), Attended(block, keys, value, bias)

        queries = op.Transpose(blocks, perm=[2, 0, 1, 3, 4])
        _, contexts = op.Scan(size, queries, body=of_block, num_scan_inputs=1)
        context = Joined(op.Transpose(contexts, perm=[1, 2, 0, 3, 4]), query)
    return context


FUNCTIONS = (Attended, Blocks, BlocksOfKeys, Joined, Far, LocalAttention, GlobalAttention)


def register() -> str:
    """Make the attention known to transformers; return the name that its models are opened with."""
    import transformers

    transformers.AttentionInterface.register(NAME, attend)
    # The mask [B, S], not one of all pairs of positions.
    transformers.AttentionMaskInterface.register(NAME, lambda attention_mask, **_: attention_mask)
    return NAME


def attend(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any
) -> tuple[Any, None]:
    """[B, N, S, H] and the mask [B, S] -> [B, S, N, H], as a call of a function of the graph."""
    import torch

    inputs = (query * options["scaling"], key, value, attention_mask[:, None, :, None].float())
    name = "GlobalAttention"
    attributes = {"short": SHORT}
    if options["sliding_window"]:
        width = module.config.local_attention // 2 * 2
        name = "LocalAttention"
        attributes = {"width": width, "short": SHORT}
    form = {"dtype": query.dtype, "shape": query.shape, "version": 1}
    context = torch.onnx.ops.symbolic(f"{NAME}::{name}", inputs, attributes, **form)
    return context.transpose(1, 2), None


def add_functions(path: Path) -> None:
    """Write the functions into a graph that calls them."""
    model = onnx.load(path)
    for function in FUNCTIONS:
        written = function.to_function_proto()
        # onnxscript leaves the domain of calls in a branch out.
        if all(of.domain != NAME for of in written.opset_import):
            written.opset_import.append(onnx.helper.make_opsetid(NAME, 1))
        model.functions.append(written)
    onnx.save(model, path)
