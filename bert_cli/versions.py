"""The versions that results depend on: of this package, of Python and of libraries.

They stand in manifests and checkpoints, and the processes of a run compare them.
"""

import platform
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from bert_cli import __version__


def package_versions(packages: Sequence[str]) -> dict[str, str]:
    """Return the versions of this package, of Python and of `packages`."""
    versions = {"bert_cli": __version__, "python": platform.python_version()}
    versions |= dict.fromkeys(packages, "not installed")
    for package in packages:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions
