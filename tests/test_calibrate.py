"""`kvframe calibrate` against the keys and values of a plain forward of transformers."""

from __future__ import annotations

import json

import pytest
import torch

from kvframe.cli import main
from kvframe.config import build_model, compose
from kvframe.evaluation import texts
from kvframe.text import TextCodec

MODEL = ["model=random", "model.dtype=float32", "kernel=reference"]


def largest(module, pieces):
    """Per layer the largest |k| and |v| over all pieces, from transformers' own cache: keys as attention gets them."""
    seen: dict[str, dict[str, float]] = {}
    for piece in pieces:
        with torch.inference_mode():
            cache = module(torch.as_tensor(piece)[None].long(), use_cache=True).past_key_values
        for i, layer in enumerate(cache.layers):
            sizes = {"k": float(layer.keys.abs().max()), "v": float(layer.values.abs().max())}
            seen[str(i)] = {kind: max(size, seen.get(str(i), sizes)[kind]) for kind, size in sizes.items()}
    return seen


@pytest.mark.parametrize("more", [["engine.max_step_tokens=10"], ["cache=radix", "cache.memory=4MiB"]], ids=str)
def test_the_file_has_the_largest_keys_and_values_of_each_layer(more, tmp_path, capsys):
    out = tmp_path / "calib.json"
    arguments = [*MODEL, "max_tokens=100", "engine.max_len=64", *more]
    assert main(["calibrate", *arguments, f"out={out}"]) == 0
    shown = capsys.readouterr().out
    found = json.loads(out.read_text())
    model = build_model(compose(arguments, "calibrate"))
    tokens = texts.tokens_of("builtin", TextCodec(vocab_size=model.vocab_size), 100)
    model.module.set_attn_implementation("eager")
    wanted = largest(model.module, [tokens[:64], tokens[64:]])
    assert found["layers"].keys() == wanted.keys() == {"0", "1"} and found["tokens"] == 100
    for layer, sizes in wanted.items():
        assert found["layers"][layer] == pytest.approx(sizes, rel=1e-6)
        assert f"{sizes['k']:.4g}" in shown and f"{sizes['v']:.4g}" in shown
    assert len({size for sizes in wanted.values() for size in sizes.values()}) == 4, "no two of them are mixed up"


def test_a_cache_reads_the_file(tmp_path, capsys):
    out = tmp_path / "calib.json"
    assert main(["calibrate", *MODEL, "max_tokens=40", f"out={out}"]) == 0
    found = json.loads(out.read_text())
    generate = ["generate", *MODEL, "prompt=Hello", "sampling.max_new_tokens=3", "cache=fp8", "cache.memory=4MiB"]
    assert main([*generate, f"cache.codec.scales={out}"]) == 0
    del found["layers"]["1"]
    out.write_text(json.dumps(found))
    assert main([*generate, f"cache.codec.scales={out}"]) == 2
    assert "has no scale for layer 1" in capsys.readouterr().err


WRONG = {
    "max_tokens=1": "max_tokens=1 cannot be used\n  valid: an integer >= 2",
    "max_tokens=0": "max_tokens=0 cannot be used",
    "max_tokens=true": "max_tokens=True cannot be used",
    "cache=int8": "cache.codec (Int8) changes what the model computes",
    "text=nowhere.txt": "text=nowhere.txt cannot be read",
    "out=calib.csv": "has the ending '.csv'",
}


@pytest.mark.parametrize("override", WRONG)
def test_mistakes_are_told_before_the_work(override, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["calibrate", *MODEL, override]) == 2
    error = capsys.readouterr().err
    assert WRONG[override] in error and "Traceback" not in error and list(tmp_path.iterdir()) == []
