"""A worker that imports no torch."""

import stamps

assert stamps
