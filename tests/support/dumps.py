"""Dumps of MediaWiki, their extraction, and what it has written."""

import re
from unittest import mock

from bert_cli.config.data import ExtractSettings
from bert_cli.data.io.manifest import read_manifest
from bert_cli.data.steps.extract import run as extract_text
from bert_cli.data.text import extract

HEADER = """<mediawiki xml:lang="fr">
  <siteinfo>
    <base>https://fr.wikipedia.org/wiki/Accueil</base>
    <namespaces>
      <namespace key="0" case="first-letter" />
      <namespace key="10" case="first-letter">Modèle</namespace>
    </namespaces>
  </siteinfo>
"""


def page(number, title, text, namespace=0, redirect=""):
    lines = [f"    <title>{title}</title>", f"    <ns>{namespace}</ns>", f"    <id>{number}</id>"]
    lines += [f'    <redirect title="{redirect}" />'] if redirect else []
    lines += ["    <revision>", f"      <id>{number + 1000}</id>"]
    lines += [f'      <text xml:space="preserve">{text}</text>', "    </revision>"]
    return "\n".join(["  <page>", *lines, "  </page>\n"])


def articles(count, words=200):
    text = "This is '''article''' number {} of [[many]]. It goes &amp; goes on.\n" * (words // 10)
    pages = (page(n, f"Article {n}", text.replace("{}", str(n))) for n in range(1, count + 1))
    return "".join(pages)


def dump(path, pages, header=HEADER, end="</mediawiki>\n"):
    path.write_text(header + pages + end, encoding="utf-8")
    return path


def run(source, out, processes=1, *, megabytes=1, **options):
    """Extract a dump with output files of so many megabytes, and return the manifest."""
    settings = ExtractSettings(dump=source, out=out, processes=processes, **options)
    with mock.patch.object(extract, "CHUNK_BYTES", megabytes * 1_000_000):
        extract_text(settings)
    return read_manifest(out)


def tree(out):
    """Return the text of every output file by its name."""
    files = sorted(out.rglob("wiki_[0-9][0-9]"))
    return {str(file.relative_to(out)): file.read_text(encoding="utf-8") for file in files}


def titles(out):
    return re.findall(r'^<doc .*title="(.*)">$', "".join(tree(out).values()), re.MULTILINE)
