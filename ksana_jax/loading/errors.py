"""What goes wrong when a model is read."""


class LoadError(ValueError):
    """Files of a model that cannot be used: one line that names the file, what is wrong and what is supported."""
