"""`bert download`: a dump of Wikipedia, or the sample."""

from bert_cli.config.data import DownloadSettings
from bert_cli.data.io.manifest import Step
from bert_cli.data.text.download import copy_sample, download
from bert_cli.data.workers.runner import open_output
from bert_cli.errors import ConfigError
from bert_cli.settings.markers import recorded


def run(settings: DownloadSettings) -> None:
    """Download one dump to `settings.out`. Raises DataError when it cannot be verified."""
    packages = []
    if not settings.sample:
        packages.append("httpx2")
    step = Step("download", settings.out, recorded(settings), packages)
    useless = settings.model_fields_set & {"language", "date"}
    with open_output(step):
        if not settings.sample:
            download(step, settings.language, settings.date)
        elif useless:
            problem = "has no effect with --sample, which copies a file"
            raise ConfigError(min(useless), problem, "leave one out")
        else:
            copy_sample(step)
