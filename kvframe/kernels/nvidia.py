"""Which devices the CUDA kernels run on."""

from __future__ import annotations

import torch

OLDEST = (8, 0)  # compute capability


def wrong_device(device: torch.device) -> list[str]:
    """Why it is none of NVIDIA's from compute capability 8.0 on; empty when it is."""
    if device.type != "cuda":
        return [f"it runs on CUDA devices, not on {device}"]
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return ["torch finds no CUDA device of NVIDIA's (torch.cuda.is_available())"]
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST:
        return [f"it needs compute capability 8.0, and {device} has {'.'.join(map(str, capability))}"]
    return []
