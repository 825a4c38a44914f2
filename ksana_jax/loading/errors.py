"""The error of unusable model files."""


class LoadError(ValueError):
    """Files of a model cannot be used; one line names the file, the problem and what is supported."""
