"""Name the running test to coverage.py, also in child processes; record how long tests take.

It is a plugin of pytest and one of coverage.py. The name of the test travels in the environment: a child that is
started has it, and a child of a forking server sets it with the rest of its environment. (PYTEST_DONT_REWRITE)
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

TEST = "BERT_FAULTS_TEST"
OUTCOME = "BERT_FAULTS_OUTCOME"
CHOSEN = "BERT_FAULTS_CHOSEN"

durations: dict[str, float] = {}
failed: set[str] = set()
skipped: set[str] = set()


def coverage_init(registry: Any, options: dict[str, Any]) -> None:
    """Start a context for the name that the environment has, and one for every new name."""
    from coverage import Coverage, CoveragePlugin

    class FirstContext(CoveragePlugin):
        """A child gets its configuration from its parent, which began before the test did."""

        def configure(self, config: Any) -> None:
            config.set_option("run:context", os.environ.get(TEST, ""))

    def switch(event: str, values: tuple[Any, ...]) -> None:
        if event != "os.putenv" or os.fsencode(values[0]) != os.fsencode(TEST):
            return
        current = Coverage.current()
        if current is not None and current._started:
            current.switch_context(os.fsdecode(values[1]))

    sys.addaudithook(switch)
    registry.add_configurer(FirstContext())


def pytest_runtest_setup(item: Any) -> None:
    """Set the name of the test."""
    os.environ[TEST] = item.nodeid


def pytest_runtest_logreport(report: Any) -> None:
    """Add up the seconds of a test."""
    durations[report.nodeid] = durations.get(report.nodeid, 0.0) + report.duration
    if report.skipped:
        skipped.add(report.nodeid)
    if report.failed:
        failed.add(report.nodeid)


def pytest_collectreport(report: Any) -> None:
    """Note a file that cannot be imported."""
    if report.failed:
        failed.add(report.nodeid)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Run the chosen tests in the order of the file that names them."""
    if CHOSEN in os.environ:
        order = json.loads(Path(os.environ[CHOSEN]).read_text(encoding="utf-8"))
        rank = {name: number for number, name in enumerate(order)}
        if any("::" in name for name in order):
            items[:] = [item for item in items if item.nodeid in rank]
            items.sort(key=lambda item: rank[item.nodeid])


def pytest_sessionfinish(session: Any, exitstatus: int) -> None:
    """Write the seconds of the tests that passed, and the names of those that failed."""
    if OUTCOME in os.environ and not hasattr(session.config, "workerinput"):
        passed = {name: took for name, took in durations.items() if name not in failed | skipped}
        if exitstatus not in (0, 1, 5):
            failed.add(f"pytest ended with {exitstatus}")
        content = {"seconds": passed, "failed": sorted(failed)}
        Path(os.environ[OUTCOME]).write_text(json.dumps(content), encoding="utf-8")
