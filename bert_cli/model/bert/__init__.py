"""BERT: embeddings, encoder layers, heads."""
