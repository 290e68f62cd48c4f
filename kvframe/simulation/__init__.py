"""Simulation: the control plane of a cache over a request trace. No model, no tensors, no torch.

    from kvframe.config import compose
    from kvframe.simulation import simulate

    rows = simulate(compose(["trace=trace.jsonl", "cache=radix", "capacities=[1000,10000]"], "simulate"))

`trace.py` reads a trace, `building.py` builds the caches, `reference.py` and `concurrent.py` are the two modes, and
`sweep.py` runs a mode over capacities. `kvframe simulate` is this on the command line.
"""

from __future__ import annotations

from kvframe.simulation.sweep import MODES, Settings, simulate
from kvframe.simulation.trace import Trace, TraceRequest, read_trace

__all__ = ["MODES", "Settings", "Trace", "TraceRequest", "read_trace", "simulate"]
