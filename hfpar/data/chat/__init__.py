"""From rows to labelled tokens, by way of the chat template."""
