"""What a cache costs in quality: `kvframe evaluate` without its command line.

texts.py      the tokens that are computed
prepare.py    what is built, read and checked before the work
teacher.py    teacher forcing through the engine's model and cache, in chunks and token by token
measures.py   KL divergence, perplexity and agreement from two rows of logits
needle.py     a fact hidden in filler
runs.py       the passes of one cache: text, greedy, needle, warm
evaluate.py   a lineup of caches against the exact one
harness.py    tasks of the package lm-eval through the engine
"""

from __future__ import annotations
