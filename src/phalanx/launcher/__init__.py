"""Starting a job from a program; the counterpart of ``torch.distributed.launcher``."""

from .api import LaunchConfig, elastic_launch, launch_agent

__all__ = ["LaunchConfig", "elastic_launch", "launch_agent"]
