"""The elastic agent; the counterpart of ``torch.distributed.elastic.agent``."""
