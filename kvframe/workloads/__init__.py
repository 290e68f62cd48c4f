"""What a comparison runs: seeded lists of requests, one file per workload (`conf/workload/*.yaml`).

workload.py      what a workload is, how it is played and how large it is
drawing.py       seeded token ids and sizes
mixed.py         ragged prompts and outputs, nothing in common
shared_prefix.py prompts that begin alike
multi_turn.py    conversations: a turn's prompt is all that was said before, answers included
long_context.py  a few long prompts
endless.py       texts that outgrow an attention window
file.py          requests from a file

Somebody else's workload is a class like these and a `conf/workload/NAME.yaml` in a package's config folder.
"""

from __future__ import annotations
