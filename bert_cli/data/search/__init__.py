"""Search: passages of documents, and an index of their words and vectors."""
