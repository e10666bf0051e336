"""The one exception that a person is meant to read."""


class NpglmError(ValueError):
    """Bad input. Its text is one line that names the file, key or tensor, what was found and what was expected."""
