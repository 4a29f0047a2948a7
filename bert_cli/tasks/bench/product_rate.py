"""How fast this machine multiplies matrices: what a model's FLOP/s are a share of.

Measured are the products of the model itself, in the run's number format, in the process and with the
threads of the run: no datasheet knows those of a virtual machine or of a container. Each gets as many
rows as make its start cheap beside it, so the rate is the machine's and does not follow the
micro-batch; the fastest counts.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterable

import keras
import tensorflow as tf

from bert_cli.tasks.bench.flops import Product

ROUNDS = 7
SECONDS_OF_ROUND = 0.05
"""A round repeats a product until it has taken so long: less is noise of the clock."""
# Operations of one product, at least and at most: tens of milliseconds on a few cores, and on a GPU
# more than the tens of microseconds that calling it takes.
WORK = {"CPU": (2e9, 2e10), "GPU": (2e11, 2e12)}
# Numbers that go in and come out, at most: less than a step has held, so that what fits is not refused
# here.
MOST_NUMBERS = {"CPU": 2**24, "GPU": 2**27}
LARGEST = 3
"""So many products are measured, those of the largest matrices."""


def compute_type(precision: str) -> str:
    """The number format of products under a precision of the settings."""
    return str(keras.DTypePolicy(precision).compute_dtype)


def settle() -> None:
    """Wait until the GPUs have done what they were told; a CPU has nothing left to do."""
    if tf.config.list_logical_devices("GPU"):
        tf.test.experimental.sync_devices()


def product_rate(products: Iterable[Product], precision: str, device: str) -> float:
    """Operations a second of the fastest of the products on a device, the median of some rounds."""
    kind = "GPU" if ":GPU:" in device.upper() else "CPU"
    asked = {enough(one, *WORK[kind], MOST_NUMBERS[kind]) for one in largest(products)}
    return max(_rate(one, compute_type(precision), device) for one in asked)


def largest(products: Iterable[Product]) -> list[Product]:
    """One product of each of the largest matrices, that with the most rows."""
    by_matrix: dict[tuple[int, int], Product] = {}
    for one in sorted(products):
        by_matrix[one.width, one.outputs] = one
    return sorted(by_matrix.values(), key=lambda one: -one.width * one.outputs)[:LARGEST]


def enough(product: Product, least: float, most: float, numbers: int) -> Product:
    """The product with so many rows that it is between so many operations, or at most so many numbers."""
    of_row = product.flops / product.rows
    rows = min(max(product.rows, math.ceil(least / of_row)), math.ceil(most / of_row))
    room = numbers // (product.width + product.outputs)
    return product._replace(rows=max(1, min(rows, room)))


def _rate(product: Product, kind: str, device: str) -> float:
    with tf.device(device):
        left = tf.cast(tf.random.stateless_normal([product.rows, product.width], [0, 1]), kind)
        right = tf.cast(tf.random.stateless_normal([product.width, product.outputs], [0, 2]), kind)
        multiply = tf.function(tf.matmul, autograph=False)

        def take(times: int) -> float:
            began = time.perf_counter()
            for _ in range(times):
                multiply(left, right)
            settle()
            return time.perf_counter() - began

        return product.flops / _median_seconds(take)


def _median_seconds(take: Callable[[int], float]) -> float:
    """Seconds of one of what `take` does so many times."""
    take(1)
    times = max(1, round(SECONDS_OF_ROUND / max(take(1), 1e-6)))
    return statistics.median(take(times) / times for _ in range(ROUNDS))
