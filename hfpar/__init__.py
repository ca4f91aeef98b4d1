"""Fine-tune Hugging Face causal language models in any parallel layout; no layout changes the numbers."""

__version__ = "0.1.0"
