"""The controls of `bert verdict`, whose verdict is known."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_verdict_of_shuffled_words_of_text_and_of_no_learning(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import verdict_controls

    found = verdict_controls.controls(range(1))
    assert found == {kind: {name: 1} for kind, name in verdict_controls.EXPECTED.items()}
