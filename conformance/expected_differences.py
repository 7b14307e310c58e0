"""Where Phalanx differs from torch 2.13 on purpose, and why.

A difference that is not listed is a failure; so is a listed one that is no longer there.
"""

from __future__ import annotations

from compare import Difference as D

EXPECTED: list[D] = []
