"""`bert data`: run the steps from a dump to indexed records, each with its folder in OUT.

A second sequence length with the same OUT reuses the extracted text and the sentences.
"""

from bert_cli.config.data import (
    DataChainSettings,
    ExtractSettings,
    IndexSettings,
    PreprocessSettings,
    TokenizeSettings,
)
from bert_cli.data.records.tokenize import vocabulary_of
from bert_cli.data.steps import extract, index, preprocess, tokenize
from bert_cli.processes import print_line
from bert_cli.settings.settings import Settings


def run(settings: DataChainSettings) -> None:
    """Run extract, preprocess, tokenize and index."""
    extracted = settings.out / "extracted"
    sentences = settings.out / "sentences"
    records = settings.out / str(settings.sequence_length)
    if settings.masking == "dynamic":
        records = records.with_name(f"{records.name}_dynamic")
    # Fails before hours of extraction.
    vocabulary_of(settings.vocab, cased=settings.cased, pairs=settings.nsp)
    for step, settings_class, paths in (
        (extract, ExtractSettings, {"dump": settings.dump, "out": extracted}),
        (preprocess, PreprocessSettings, {"input": extracted, "out": sentences}),
        (tokenize, TokenizeSettings, {"input": sentences, "out": records}),
        (index, IndexSettings, {"folder": records, "vocab": None}),
    ):
        step.run(step_settings(settings_class, settings, **paths))
    print_line(f"data: the records are in {records}")


def step_settings(
    settings_class: type[Settings], settings: DataChainSettings, **paths: object
) -> Settings:
    """Return the settings of a step: its paths, and the settings that it shares with the chain."""
    names = settings.model_fields_set & set(settings_class.model_fields)
    shared = settings.model_dump(include=names, by_alias=True)
    return settings_class.model_validate({**shared, **paths})
