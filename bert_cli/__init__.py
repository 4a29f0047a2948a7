"""`bert`: from a Wikipedia dump, or text of your own, to a pre-trained BERT."""

__version__ = "0.2.0"
