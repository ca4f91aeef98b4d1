"""Models: loading, adapters, and the tiny model that is built on the spot."""
