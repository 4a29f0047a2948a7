"""The settings of properties: the same inputs in every run, and none of them kept in a file."""

from functools import partial

from hypothesis import settings
from hypothesis import strategies as some

settings.register_profile("tests", derandomize=True, max_examples=60, deadline=None, database=None)
settings.load_profile("tests")
numbers = some.integers
several = partial(some.lists, min_size=1)
SEEDS = numbers(0, 2**32 - 1)
