"""`bert data`: the steps from a dump to indexed records.

Each step has its folder in OUT with its manifest, and restarts as its command does. A second sequence
length on the same OUT finds extraction and sentences complete.
"""

from typing import TypeVar

from bert_cli.config.data import (
    DataChainSettings,
    DataSettings,
    ExtractSettings,
    IndexSettings,
    PreprocessSettings,
    TokenizeSettings,
)
from bert_cli.data.records import index, tokenize
from bert_cli.data.records.vocab import find_vocabulary
from bert_cli.data.text import extract, preprocess

Step = TypeVar("Step", bound=DataSettings)


def run(settings: DataChainSettings) -> None:
    """Run extract, preprocess, tokenize and index."""
    extracted, sentences = settings.out / "extracted", settings.out / "sentences"
    records = settings.out / str(settings.sequence_length)
    if settings.masking == "dynamic":
        records = records.with_name(f"{records.name}_dynamic")
    find_vocabulary(settings.vocab, cased=settings.cased)  # fails before hours of extraction
    extract.run(step_settings(ExtractSettings, settings, dump=settings.dump, out=extracted))
    preprocess.run(step_settings(PreprocessSettings, settings, input=extracted, out=sentences))
    tokenize.run(step_settings(TokenizeSettings, settings, input=sentences, out=records))
    index.run(step_settings(IndexSettings, settings, folder=records, vocab=None))
    print(f"data: the records are in {records}")


def step_settings(kind: type[Step], settings: DataChainSettings, **paths: object) -> Step:
    """Return the settings of a step: its paths, and the settings of the chain that it has too."""
    shared = settings.model_dump(include=settings.model_fields_set & set(kind.model_fields))
    return kind.model_validate({**shared, **paths})
