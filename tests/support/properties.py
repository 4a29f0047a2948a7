"""The settings of properties: the same inputs in every run, and none of them kept in a file."""

from functools import partial

from hypothesis import settings, strategies
from hypothesis.internal.conjecture import providers

# It would also draw texts and numbers of the modules that are loaded, which differ with the tests of a run.
providers._get_local_constants = lambda: providers._local_constants
settings.register_profile("tests", derandomize=True, max_examples=60, deadline=None, database=None)
settings.load_profile("tests")
integers = strategies.integers
nonempty_lists = partial(strategies.lists, min_size=1)
SEEDS = integers(0, 2**32 - 1)
