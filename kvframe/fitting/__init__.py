"""What fits: bytes of keys and values under any cache, against a model's weights and a device's memory.

    from kvframe.config import compose
    from kvframe.fitting import fit

    asked = ["model=random", "model.shape=qwen2_5_0_5b", "context=2048", "requests=100", "memory=24GiB"]
    found = fit(compose(asked, "plan"), asked)
    for row in found.rows:
        print(row["cache"], row["bytes_per_token"], row["bytes_total"], row["requests_that_fit"])

No weights are loaded (see kvframe.hf.skeleton), and no tensor of a cache is made: the figures come from the control
plane that would be built for these layers, and so from the codecs' `planes`.
"""

from __future__ import annotations

from kvframe.fitting.rows import Fitting, fit

__all__ = ["Fitting", "fit"]
