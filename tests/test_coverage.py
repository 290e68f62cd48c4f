"""The coverage tool: tiny configs, what it calls exact, refused, out of scope and wrong, and children that fail."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import children
import pytest
import torch
import transformers

from kvframe.errors import UnsupportedModelError
from kvframe.hf import wrap
from kvframe.testing import tiny_model
from kvframe.testing.coverage import __main__ as command
from kvframe.testing.coverage import bypass, classify, shrink
from kvframe.testing.coverage.build import architectures, build, configs
from kvframe.testing.coverage.compare import compare
from kvframe.testing.coverage.report import TITLES, counts, markdown, result
from kvframe.testing.coverage.worker import Worker

torch.set_num_threads(1)

# class -> status, and a text of the reason or of what was seen
SAMPLE = {
    "Llama4ForCausalLM": ("exact", "5 chunk8, 1 full"),
    "Gemma4ForCausalLM": ("exact", "16/16, 32/32"),
    "MiniCPM3ForCausalLM": ("exact", "24/16"),
    "DiffLlamaForCausalLM": ("exact", "8 full"),
    "RobertaForCausalLM": ("exact", "an encoder"),
    "DeepseekV32ForCausalLM": ("refused", "indices"),
    "FalconForCausalLM": ("refused", "never called"),
    "Lfm2ForCausalLM": ("refused", "a convolution over 3 tokens"),
    "BartForCausalLM": ("out_of_scope", "has cross-attention"),
}


PAGE = Path(__file__).parent.parent / "docs" / "models.md"


def checked(name: str) -> dict:
    """The row of a class, after a look at its facts."""
    if name not in architectures():
        pytest.skip(f"this transformers has no {name}")
    row = classify.classify(name)
    for config in row["configs"]:
        assert config["parameters"] < 2e7
        assert config["status"] != "exact" or (config["error"] < 1e-3 and config["tokens"] > 24 <= config["hits"])
        assert config["status"] != "refused" or config["evidence"]
    return row


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_of_architectures(name):
    row, (status, seen) = checked(name), SAMPLE[name]
    assert (row["architecture"], row["status"]) == (name, status), row["reason"]
    assert seen in json.dumps(row)
    assert all(config["parameters"] < 2e6 for config in row["configs"])


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in architectures() if name not in SAMPLE])
def test_every_architecture(name):
    row = checked(name)
    assert row["status"] in ("exact", "refused", "out_of_scope"), row["reason"]
    assert made_with() != transformers.__version__ or documented()[name] == row["status"], "docs/models.md is old"


def documented() -> dict[str, str]:
    """Class -> status, as docs/models.md has it."""
    sections = re.split(r"^## (.+)$", PAGE.read_text("utf-8"), flags=re.MULTILINE)
    statuses = {title: status for status, title in TITLES.items()}
    return {
        name: statuses[title]
        for title, text in zip(sections[1::2], sections[2::2])
        if title in statuses
        for name in re.findall(r"^\| (\w+) \|", text, flags=re.MULTILINE)
        if name != "class"
    }


def made_with() -> str:
    return re.search(r"transformers (\S+),", PAGE.read_text("utf-8"))[1]


def test_the_page_is_whole():
    found = documented()
    assert list(found.values()).count("exact") >= 95 and "wrong" not in found.values()
    assert made_with() != transformers.__version__ or set(found) == set(architectures())


# -- wrong is found ------------------------------------------------------------------------------------------


def llama():
    return classify.classify_config("LlamaForCausalLM", configs("LlamaForCausalLM")[-1])


def test_a_refusal_without_need_is_wrong(monkeypatch):
    def refuse(module):
        raise UnsupportedModelError("LlamaForCausalLM: it looks at me")

    monkeypatch.setattr(classify, "HFModel", type("Refusing", (), {"from_module": staticmethod(refuse)}))
    row = llama()
    assert row["status"] == "wrong" and "it looks at me" in row["reason"] and "are REF's" in row["reason"]


@pytest.mark.parametrize("field, value", [("scale", 0.3), ("window", 5), ("softcap", 2.0)])
def test_a_model_that_answers_something_else_is_wrong(field, value):
    module = build("LlamaForCausalLM", configs("LlamaForCausalLM")[-1])
    model = wrap(module)
    model.layers = tuple(replace(spec, **{field: value}) for spec in model.layers)
    with pytest.raises(AssertionError, match="differ from REF|REF says"):
        compare(module, model)


def test_what_cannot_be_built_or_loaded_is_wrong(monkeypatch):
    monkeypatch.setattr(classify, "build", lambda *a: 1 / 0)
    row = llama()
    assert row["status"] == "wrong" and "no tiny model" in row["reason"] and "ZeroDivisionError" in row["reason"]
    monkeypatch.undo()
    monkeypatch.setattr(classify, "HFModel", type("Broken", (), {"from_module": staticmethod(lambda m: 1 / 0)}))
    assert "loading it fails: ZeroDivisionError" in llama()["reason"]


@pytest.mark.parametrize("arch", ["falcon", "bloom", "lfm2", "mamba"])
def test_what_the_probe_refuses_is_not_ref_without_the_refusal(arch):
    needed, seen = bypass.without_refusal(tiny_model(arch))
    assert needed and seen.startswith("without the refusal: ")


# -- tiny configs --------------------------------------------------------------------------------------------


def test_layers_that_differ_are_kept():
    types = ["s", "s", "s", "f"] * 3
    values = {"num_hidden_layers": 12, "layer_types": types, "mlp": ["d"] * 2 + ["m"] * 10, "other": [1, 2]}
    assert shrink.layers_kept(values) == ([0, 1, 2, 3], 12)
    small = shrink.shrunk(values)
    assert small == {"num_hidden_layers": 4, "layer_types": ["s", "s", "s", "f"], "mlp": list("ddmm"), "other": [1, 2]}
    late = {"num_hidden_layers": 12, "layer_types": ["s"] * 11 + ["f"]}
    assert shrink.shrunk(late) == {"num_hidden_layers": 4, "layer_types": ["s", "s", "s", "f"]}
    assert shrink.layers_kept({"num_hidden_layers": 12}) is None and shrink.layers_kept({"layer_types": types}) is None


def test_sizes_are_small_and_never_larger():
    big = {"vocab_size": 128_000, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
           "intermediate_size": 11_008, "num_hidden_layers": 32, "n_routed_experts": 256, "num_experts_per_tok": 8,
           "max_position_embeddings": 131_072, "head_dim": 128, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
           "image_token_id": 99_999, "eos_token_id": 128_001, "sliding_window": None}  # fmt: skip
    assert shrink.shrunk(big) == {
        "vocab_size": 256, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 96, "num_hidden_layers": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "max_position_embeddings": 512, "head_dim": 16, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
        "image_token_id": 240, "eos_token_id": 2, "sliding_window": 8,
    }  # fmt: skip
    assert shrink.shrunk({"hidden_size": 8, "num_experts": 3})["hidden_size"] == 8
    assert shrink.shrunk({"num_attention_heads": 32, "num_key_value_heads": 32, "kv_lora_rank": 512}) == {
        "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 16,
    }  # fmt: skip


# -- children ------------------------------------------------------------------------------------------------


def test_children_that_fail_get_their_row_and_the_next_goes_on():
    with Worker(children.serve, timeout=2.0) as worker:
        rows = {name: worker.classify(name) for name in ("A", "B", "Crash", "C", "Kill", "Hang", "D")}
    assert [row["status"] for row in rows.values()] == ["exact", "exact", "wrong", "exact", "wrong", "wrong", "exact"]
    assert all(row["architecture"] == name for name, row in rows.items())
    assert "exit code 3" in rows["Crash"]["reason"] and "signal 9" in rows["Kill"]["reason"]
    assert "longer than 2 seconds" in rows["Hang"]["reason"]
    pids = [rows[name]["reason"] for name in "ABCD"]
    assert pids[0] == pids[1] and len(set(pids)) == 3, "a child goes on until it fails"
    with Worker(children.serve_never) as worker:
        assert worker.classify("A")["status"] == "wrong"


# -- the report ----------------------------------------------------------------------------------------------


def rows_of(**statuses) -> list[dict]:
    seen = {"layers": "4 full", "heads": "4/2", "sizes": "16/16", "also": ""}
    seen["evidence"] = "without the refusal: it | fails"
    return [
        {"architecture": name, "status": status, "reason": f"{name} is {status}", "seconds": 1.0, "configs": [seen]}
        for name, status in statuses.items()
    ]


def test_report_counts_and_lists_every_class():
    rows = rows_of(B="exact", a="exact", C="refused", D="out_of_scope", E="exact")
    rows[-1]["configs"] = [{**rows[-1]["configs"][0], "note": "an encoder: without is_decoder=True it is not causal"}]
    statuses = {"exact": 3, "refused": 1, "out_of_scope": 1, "wrong": 0}
    assert counts(rows) == {"architectures": 5, **statuses, "exact_decoders": 2}
    page = markdown(rows)
    assert page.index("| a | 4 full") < page.index("| B | 4 full"), "sorted, whatever the case"
    assert "| C | C is refused | it / fails |" in page and "| E | 4 full | 4/2 | 16/16 | an encoder |" in page
    assert f"torch {version('torch')}" in page and "## Wrong" in page and page.endswith("None.\n")
    assert result(rows)["rows"] == rows and set(result(rows)["versions"]) >= {"torch", "transformers"}


def test_the_command(tmp_path, monkeypatch, capsys):
    asked = []

    def fake(names, timeout):
        asked.extend(names)
        yield from rows_of(**{name: "wrong" if name == "MptForCausalLM" else "exact" for name in names})

    monkeypatch.setattr(command, "rows", fake)
    out, page = tmp_path / "cov.json", tmp_path / "page.md"
    arguments = ["--only", "LlamaForCausalLM,MptForCausalLM", "--out", str(out), "--markdown", str(page)]
    assert command.main(arguments) == 1
    told = capsys.readouterr()
    assert "1 exact, 0 refused, 0 out of scope, 1 wrong" in told.out and "wrong: MptForCausalLM" in told.err
    assert [row["architecture"] for row in json.loads(out.read_text())["rows"]] == asked
    assert "| MptForCausalLM | MptForCausalLM is wrong |" in page.read_text()

    asked.clear()
    assert command.main([*arguments, "--resume"]) == 1 and asked == ["MptForCausalLM"], "what was wrong is tried again"
    assert len(json.loads(out.read_text())["rows"]) == 2
    assert command.main(["--only", "Llama,MptForCausalLM"]) == 2
    assert "no such architecture: Llama\n" in capsys.readouterr().err
