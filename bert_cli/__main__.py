"""Lets `python -m bert_cli` be `bert`."""

import sys

from bert_cli.cli import main

sys.exit(main())
