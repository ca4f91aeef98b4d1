"""The engines: how gradients are averaged and weights are kept, one file each, behind the same few verbs."""
