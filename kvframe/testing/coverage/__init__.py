"""Which causal LMs of the installed transformers run under kvframe, found by running a tiny one of each.

    python -m kvframe.testing.coverage --out cov.json --markdown docs/models.md

Every distinct model class gets a tiny random model from its config class (`shrink`), runs through the engine with
chunked prefill, ragged batches and prefix hits (`compare`), and is one of

- exact: tokens and logits are REF's;
- refused: loading it raises UnsupportedModelError, and without that the answer would not be REF's (`bypass`);
- out_of_scope: refused, and no decoder that stands alone (`scope`);
- wrong: anything else. There must be none.
"""
