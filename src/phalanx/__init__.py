"""Phalanx keeps distributed training running when parts of it fail."""

from phalanx._version import __version__

__all__ = ["__version__"]
