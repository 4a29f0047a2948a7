"""Compare the answers of models."""

from typing import Any

import pytest


def near(answer: Any) -> Any:
    """Return an answer that equals answers of the same model in another program, batch or engine.

    Their sums in float32 are in another order, which changes a number by some units in the last place.
    """
    if isinstance(answer, dict):
        return {name: near(value) for name, value in answer.items()}
    if isinstance(answer, list):
        return [near(value) for value in answer]
    return pytest.approx(answer, rel=1e-4, abs=1e-6) if isinstance(answer, float) else answer
