"""Mixed precision by configuration: codecs for keys, values and single layers."""

from __future__ import annotations

import pytest
from strategies import make_engine
from test_cache import control
from test_engine import ask, tokens

from kvframe.config import compose
from kvframe.errors import ConfigError, IncompatibleCacheError
from kvframe.testing import check_greedy, tiny_model, wrap
from kvframe.testing.harness import run_checked

SPELLED = ["cache/codec=mixed", "cache/codec@cache.codec.v=fp8", "+cache/codec@cache.codec.layers.0=none"]


def test_the_spelling_that_hydra_takes():
    codec = compose(["cache=paged", *SPELLED, "cache.codec.v.format=e5m2"]).cache.codec
    names = [codec[key]["_target_"].rpartition(".")[2] for key in "kv"]
    assert names == ["Int8", "Fp8"] and codec.v.format == "e5m2"
    assert codec.layers["0"]["_target_"].endswith("NoCodec")


def test_each_layer_and_kind_gets_its_codec_and_bytes_follow():
    cache = control(["cache=paged", *SPELLED, "cache.num_blocks=8"], windows=(None, None))
    bound = [type(cache.codec.for_layer(layer, kind)).__name__ for layer in cache.context.layers for kind in "kv"]
    assert bound == ["NoCodec", "NoCodec", "Int8", "Fp8"]
    plain, coded = 2 * 2 * 8 * 4, 2 * 2 * (8 + 4)  # kinds x heads x (size 8 in fp32; or bytes and a scale)
    assert cache.token_bytes == [plain + coded]


def test_sealed_keys_and_plain_values_go_together():
    overrides = ["cache/codec=mixed", "cache/codec@cache.codec.k=int4", "cache/codec@cache.codec.v=none"]
    model = wrap(tiny_model("llama"))
    outputs = []
    for chunk in (None, 7):
        options = [*overrides, "cache.codec.k.group=8", "cache.memory=4MiB"]
        engine = make_engine(model, "paged-16 radix model", chunk=chunk, overrides=options, max_requests=4)
        assert not engine.cache.exact and engine.cache.unit == 8
        outputs.append([o.output_tokens for o in run_checked(engine, [ask(tokens(40, i)) for i in range(3)])])
    assert outputs[0] == outputs[1]


def test_mixed_of_exact_codecs_is_exact():
    overrides = ["cache/codec=mixed", "cache/codec@cache.codec.k=none", "cache/codec@cache.codec.v=none"]
    model = wrap(tiny_model("qwen3"))
    engine = make_engine(model, "paged-16", overrides=overrides, max_requests=4)
    assert engine.cache.exact
    for output in run_checked(engine, [ask(tokens(20, i)) for i in range(3)]):
        assert check_greedy(model.module, output.prompt_tokens, output.output_tokens) > 0


def test_mistakes_are_told():
    with pytest.raises(IncompatibleCacheError, match="names layer 7, the model has 0 .. 3"):
        control(["cache=paged", "cache/codec=mixed", "+cache/codec@cache.codec.layers.7=none"])
    with pytest.raises(ConfigError, match=r"cache/codec@cache.codec.layers.0=none"):
        control(["cache=paged", "cache/codec=mixed", "cache.codec.layers={0:int4}"])
    with pytest.raises(ConfigError, match="int88"):
        compose(["cache=paged", "cache/codec=mixed", "cache/codec@cache.codec.k=int88"])
