"""The errors of the library: short, and about the user's own data, stage and row."""


class PipelineError(ValueError):
    """A chain of stages does not fit together, or a stage failed on a row."""


class DataError(ValueError):
    """A file or an array is not what it says it is."""


class StateError(ValueError):
    """A saved state does not belong to this loader."""
