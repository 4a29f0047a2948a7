"""Text to token ids: vocabularies, tokenizers and their fast encoders."""
