"""Which products are measured, and that what is measured follows what is multiplied."""

import pytest

from bert_cli.tasks.bench.flops import Product
from bert_cli.tasks.bench.product_rate import (
    MOST_NUMBERS,
    WORK,
    compute_type,
    enough,
    largest,
    product_rate,
)


def test_those_of_the_largest_matrices_are_measured_once_each():
    layer = [Product(4096, 768, 768)] * 4 + [Product(4096, 768, 3072), Product(4096, 3072, 768)]
    head = [Product(32, 768, 2), Product(640, 768, 768), Product(640, 768, 30522)]
    assert largest(layer * 12 + head) == [
        Product(640, 768, 30522),
        Product(4096, 768, 3072),
        Product(4096, 3072, 768),
    ]


@pytest.mark.parametrize("rows", [1, 300, 10**7])
@pytest.mark.parametrize("matrix", [(768, 30522), (768, 3072), (64, 60), (16, 2)])
def test_a_product_has_work_enough_and_no_more_memory_than_a_step(rows, matrix):
    least, most = WORK["CPU"]
    found = enough(Product(rows, *matrix), least, most, MOST_NUMBERS["CPU"])
    held = found.rows * (found.width + found.outputs)
    assert held <= MOST_NUMBERS["CPU"]
    assert found.flops <= 1.01 * most
    assert found.flops >= least or held > 0.99 * MOST_NUMBERS["CPU"]


def test_the_rate_is_that_of_the_fastest_in_the_format_of_the_products(monkeypatch):
    asked = []

    def rate(product, kind, device):
        asked.append(kind)
        return product.width

    monkeypatch.setattr("bert_cli.tasks.bench.product_rate._rate", rate)
    products = [Product(8, 32, 64), Product(8, 64, 32), Product(8, 48, 16)]
    assert product_rate(products, "mixed_bfloat16", "CPU:0") == 64
    assert set(asked) == {"bfloat16"} and compute_type("float16") == "float16"


def test_a_product_is_really_multiplied():
    assert product_rate([Product(64, 64, 64)], "float32", "CPU:0") > 1e6
