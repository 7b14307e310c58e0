"""The edge towards PyTorch: ``phalanx.elastic.X`` for ``torch.distributed.elastic.X``.

Same names, same signatures, same order of calls, and no import of torch. What is
different on purpose is in ``docs/differences.md``.
"""
