"""Evidence of hung workers: where every thread of a process stands (``stacks``)."""
