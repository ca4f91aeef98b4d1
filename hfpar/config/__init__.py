"""The settings of a run: what they are (`schema`), which are impossible (`validate`), and how they are read (`load`)."""
