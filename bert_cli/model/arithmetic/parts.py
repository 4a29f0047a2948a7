"""The parts of every block: layers that are built at once, dense layers, LayerNorms and tables."""

from collections.abc import Hashable, Mapping
from functools import cached_property
from typing import Any, ClassVar, TypedDict, dataclass_transform

import keras
from keras import ops

from bert_cli.model.arithmetic.fused import Norm, Tensor, scaled
from bert_cli.model.arithmetic.operations import Operands, Operations

# Columns of a micro-batch, by name.
Columns = Mapping[str, Tensor]
# A dropout key, None for no dropout.
Key = Tensor | None
# Attributes of Keras itself, and attributes that may differ between layers with one trace.
NOT_IN_TRACE_KEY = {*vars(keras.layers.Layer(name="layer")), "dropout_id", "number"}


class Arguments(TypedDict):
    """The arguments of every layer."""

    name: str
    policy: keras.DTypePolicy
    operations: Operations
    config: Any


@dataclass_transform(kw_only_default=True)
class Layer(keras.layers.Layer):
    """A Keras layer that takes the attributes its class annotates, is built at once, and casts no inputs or weights."""

    name: str
    policy: keras.DTypePolicy
    operations: Operations
    config: Any = None
    """The shape of the model, of its architecture's class."""

    def __init__(
        self, *, name: str, policy: keras.DTypePolicy, operations: Operations, **attributes: Any
    ) -> None:
        """Create the weights; `operations` are those of the layer or model in which this layer is."""
        for attribute, value in attributes.items():
            setattr(self, attribute, value)
        self.operations = operations.inside(name)
        super().__init__(name=name, dtype=policy, autocast=False)
        self.build()

    def build(self) -> None:
        """Create the weights, in the scope of the layer's name."""
        self._create_weights()

    def _create_weights(self) -> None:
        pass

    def add_zeros(self, name: str, *shape: int) -> keras.Variable:
        """Return a new weight; `build_block` sets its first value."""
        return self.add_weight(name=name, shape=shape, initializer="zeros", autocast=False)

    @cached_property
    def trace_key(self) -> Hashable:
        """A key that is equal for layers that may share one trace."""
        # Such layers have equal classes and attributes, also in their inner layers. The values of their weights and the
        # dropout ids may differ. A layer with an attribute that cannot be compared shares no trace.
        values: list[object] = [type(self), self.dtype_policy.name]
        for name, value in vars(self).items():
            if name.startswith("_") or name in NOT_IN_TRACE_KEY:
                continue
            if isinstance(value, Layer):
                # Recursive: layers inside layers count with all their attributes.
                value = value.trace_key
            elif isinstance(value, keras.Variable):
                value = value.shape
            values.append((name, value if isinstance(value, Hashable) else id(value)))
        return tuple(values)

    @property
    def kernel_dtype(self) -> str:
        """The dtype to which the kernels of an encoder layer may be cast before it reads them."""
        # Unit Scaling multiplies kernels before they are rounded.
        if self.operations.factors:
            return str(self.variable_dtype)
        return str(self.compute_dtype)

    def scaled(self, name: str, value: Any) -> Any:
        """Return a weight or activation times its factors; without Unit Scaling the value itself."""
        factor = self.operations.factors.get(name)
        if factor is None:
            return value
        return scaled(value, factor.forward, factor.backward)

    def part(self, name: str) -> Arguments:
        """Return the arguments of a layer inside this layer."""
        return {
            "name": name,
            "policy": self.dtype_policy,
            "operations": self.operations,
            "config": self.config,
        }

    def dense(
        self, name: str, inputs: int = 0, outputs: int = 0, *, has_bias: bool = True
    ) -> "Dense":
        """Return a new dense layer inside this layer; both its sizes are the hidden size by default."""
        width = self.config.hidden_size
        sizes = {"inputs": inputs or width, "outputs": outputs or width}
        return Dense(**self.part(name), **sizes, has_bias=has_bias)

    def norm(self, name: str = "layer_norm", *, has_beta: bool = True) -> "LayerNorm":
        """Return a new LayerNorm inside this layer."""
        return LayerNorm(
            **self.part(name),
            size=self.config.hidden_size,
            epsilon=self.config.layer_norm_eps,
            has_beta=has_beta,
        )

    def embedding(self, name: str, rows: int) -> "Embedding":
        """Return a new table inside this layer."""
        return Embedding(**self.part(name), rows=rows, size=self.config.hidden_size)


class Dense(Layer):
    """x @ kernel in the compute dtype, plus bias in float32; the result stays float32.

    Of Unit Scaling it has the factors `input` and `output`, besides those of its weights.
    """

    inputs: int
    outputs: int
    has_bias: bool = True

    def _create_weights(self) -> None:
        self.kernel = self.add_zeros("kernel", self.inputs, self.outputs)
        self.bias = self.add_zeros("bias", self.outputs) if self.has_bias else None

    def call(self, x: Tensor) -> Tensor:
        """[..., inputs] in the compute dtype -> [..., outputs] in float32."""
        return self.scaled("output", self.operations.dense(*self.operands(x)))

    def operands(self, x: Tensor) -> Operands:
        """Return the input, the kernel and the bias, for an operation that does more than multiply."""
        bias = None if self.bias is None else self.scaled("bias", self.bias)
        return self.scaled("input", x), self.scaled("kernel", self.kernel), bias


class LayerNorm(Layer):
    """LayerNorm over the last axis, float32 in and out."""

    size: int
    epsilon: float
    has_beta: bool = True

    def _create_weights(self) -> None:
        self.gamma = self.add_zeros("gamma", self.size)
        self.beta = self.add_zeros("beta", self.size) if self.has_beta else None

    def call(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D], both float32."""
        *scales, epsilon = self.parameters
        return self.operations.normalize(x, (*scales, self.scaled("epsilon", epsilon)))

    @property
    def parameters(self) -> Norm:
        """Return gamma, beta and epsilon."""
        return self.scaled("gamma", self.gamma), self.scaled("beta", self.beta), self.epsilon


class Embedding(Layer):
    """A table whose rows are looked up by number, as float32."""

    rows: int
    size: int

    def _create_weights(self) -> None:
        self.embeddings = self.add_zeros("embeddings", self.rows, self.size)

    def call(self, numbers: Tensor) -> Tensor:
        """Integers [...] -> float32 [..., D]; only the rows that are read are cast."""
        rows = ops.cast(ops.take(self.embeddings, numbers, axis=0), "float32")
        return self.scaled("embeddings", rows)


class Block(Layer):
    """A piece of the model: `block(hidden, batch, key) -> hidden`; the first block takes no hidden values."""

    READS: ClassVar[tuple[str, ...]] = ()
    """The columns of a micro-batch that the block reads."""
    dropout_id: int = 0
    """The first of its dropout ids."""
