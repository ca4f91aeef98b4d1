"""Fine-tune Hugging Face causal language models in any parallel layout, with numbers that no layout changes."""

__version__ = "0.1.0"
