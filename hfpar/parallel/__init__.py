"""The layout of ranks and every patch on a Hugging Face model."""
