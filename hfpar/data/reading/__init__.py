"""From files of any kind to rows of one shape, each with its place."""
