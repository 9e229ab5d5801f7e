"""jitloader."""
