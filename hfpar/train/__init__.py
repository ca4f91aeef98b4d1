"""Training: the step, the loss, checkpoints, and what a person sees meanwhile."""
