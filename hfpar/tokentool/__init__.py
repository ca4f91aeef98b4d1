"""`hfpar tokens`: what a checkpoint's embedding says of its special tokens."""
