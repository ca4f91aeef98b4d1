"""Attention over a packed stream of documents, offered to Transformers under hfpar's own names."""
