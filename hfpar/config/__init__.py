"""A run's settings: what they are, which values are impossible, and how they are read and written."""
