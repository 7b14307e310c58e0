"""For programs whose training loop belongs to a library: see ``docs/training.md``.

`lightning` and `huggingface` each import their library; nothing else here does.
"""
