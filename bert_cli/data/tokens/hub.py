"""The Hugging Face hub: download files of a model, or find them in the cache where the hub does not answer."""

from collections.abc import Callable
from pathlib import Path

# Time in which the hub must answer the first request.
SECONDS = 10


def download(name: str, patterns: list[str], has_files: Callable[[Path], bool]) -> Path:
    """Return the folder of a model's files whose names match the patterns.

    Raises ConnectionError, caused by the first failure, if the hub does not answer and the cache has no folder with
    the files (`has_files`), and the errors of the hub's client for what it answers.
    """
    from huggingface_hub import HfApi, snapshot_download  # takes 1 s
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    failure = None
    try:
        # The first request of snapshot_download waits for ever.
        HfApi().repo_info(name, timeout=SECONDS)
    except HfHubHTTPError:
        pass  # an answer, which snapshot_download treats
    except Exception as error:  # those of the client's library for connections
        failure = error
    try:
        offline = failure is not None
        folder = Path(snapshot_download(name, allow_patterns=patterns, local_files_only=offline))
    except LocalEntryNotFoundError as error:
        raise ConnectionError(name) from failure or error.__cause__ or error
    if failure is not None and not has_files(folder):
        raise ConnectionError(name) from failure
    return folder
