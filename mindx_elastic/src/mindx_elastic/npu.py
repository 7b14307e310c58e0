"""An example of a device check, with npu-smi. It has not been run: there was no NPU at hand.

``mindx_elastic.api.set_device_check(mindx_elastic.npu.check)``
"""

from __future__ import annotations

import re
import subprocess

_HEALTH = re.compile(r"Health\s*(?:Status)?\s*:\s*(\w+)", re.IGNORECASE)


def check(devices: int = 8, timeout: float = 4.0) -> dict[int, int]:
    """Local ranks whose NPU does not call itself OK, as fault type 1."""
    broken = {}
    for device in range(devices):
        try:
            done = subprocess.run(
                ["npu-smi", "info", "-t", "health", "-i", str(device)],
                capture_output=True,
                text=True,
                timeout=timeout,
            )
        except FileNotFoundError:
            return {}
        except subprocess.TimeoutExpired:
            broken[device] = 1
            continue
        found = _HEALTH.search(done.stdout)
        if done.returncode == 0 and found and found.group(1).upper() not in ("OK", "WARNING"):
            broken[device] = 1
    return broken
