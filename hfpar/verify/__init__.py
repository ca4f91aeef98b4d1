"""Layouts and engines against one plain process: the loss, the gradient norm, every gradient, every weight."""
