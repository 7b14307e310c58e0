"""The level at which the elastic loggers start."""


def get_log_level() -> str:
    """``WARNING``: what is logged unless ``LOGLEVEL`` says otherwise."""
    return "WARNING"
