"""A lineup: entries become configs on top of the command's own overrides, and one cache goes before the next comes."""

from __future__ import annotations

import weakref

import pytest
from omegaconf import OmegaConf

from kvframe.cli import main
from kvframe.commands import Command
from kvframe.config import compose, groups
from kvframe.errors import CapacityError, ConfigError, IncompatibleCacheError
from kvframe.hf import random_model
from kvframe.lineup import Candidate, lineup, own_overrides, preset, running
from kvframe.types import Request, SamplingParams

OWN = ["model=random", "model.shape=tiny", "cache.memory=64MiB"]


def targets(candidates: list[Candidate]) -> list[str]:
    return [candidate.cfg.cache.index._target_.rpartition(".")[2] for candidate in candidates]


# -- what entries mean ---------------------------------------------------------------------------------------


def test_an_entry_is_a_preset_or_overrides_or_both():
    entries = ["paged", "cache=radix cache/retention=sliding_window", " radix  engine.max_len=33 kernel=reference "]
    one, two, three = lineup(entries, OWN)
    assert [c.name for c in (one, two, three)] == [entry.strip() for entry in entries]
    assert targets([one, two, three]) == ["NoIndex", "RadixIndex", "RadixIndex"]
    assert one.cfg.cache == compose(["cache=paged", *OWN], "evaluate").cache
    assert two.cfg.cache.retention == compose(["cache=sliding_window"]).cache.retention
    assert (one.cfg.engine.max_len, three.cfg.engine.max_len) == (None, 33)
    assert one.cfg.kernel != three.cfg.kernel and "hydra" not in one.cfg


def test_words_are_split_as_a_shell_does():
    entry = "cache=paged 'cache.group_share={full: 1, window8: 2}' cache.memory='1 GiB'"
    (one,) = lineup([entry], OWN)
    assert one.cfg.cache.group_share == {"full": 1, "window8": 2} and one.cfg.cache.memory == "1 GiB"


def test_an_entry_replaces_what_the_command_says_of_the_same_key():
    own = ["cache=sliding_window", "cache.memory=1GiB", "engine.max_len=64", "text=a, ${b}"]
    one, two = lineup(["paged cache.memory=2GiB", "engine.max_len=32"], own)
    assert (one.cfg.cache.memory, one.cfg.engine.max_len, one.cfg.text) == ("2GiB", 64, "a, ${b}")
    assert one.cfg.cache.retention == compose().cache.retention
    assert two.cfg.cache.retention.window and (two.cfg.cache.memory, two.cfg.engine.max_len) == ("1GiB", 32)


def test_a_preset_is_not_changed_by_the_command_in_silence():
    with pytest.raises(ConfigError, match=r"'paged' names a preset, .* cache/codec=int8 would change it"):
        lineup(["paged"], ["model=random", "cache/codec=int8"])
    own = ["model=random", "cache=paged", "cache/codec=mixed", "cache/codec@cache.codec.k=fp8"]
    (one,) = lineup(["cache/codec@cache.codec.v=none"], own)
    names = [one.cfg.cache.codec[kind]["_target_"].rpartition(".")[2] for kind in "kv"]
    assert names == ["Fp8", "NoCodec"], "choices for K and V do not replace each other"


def test_nothing_means_every_preset_on_the_search_path(install, monkeypatch):
    install("mine", files={"cache/mine.yaml": "# Mine.\ndefaults:\n  - paged\n"})
    everything = groups()["cache"]
    assert "mine" in everything and "radix" in everything
    monkeypatch.setattr("kvframe.lineup._composed", lambda overrides, command: OmegaConf.create({"hydra": None}))
    for nothing in (None, ""):
        assert [c.name for c in lineup(nothing, OWN)] == everything


def test_a_single_entry_needs_no_brackets_and_another_command_may_ask():
    (one,) = lineup("radix", ["prompt=a, b", "caches=[paged]"], "generate")
    assert one.name == "radix" and one.cfg.prompt == "a, b" and "sampling" in one.cfg


def test_the_default_preset_keeps_memory_and_engine_and_nothing_else_of_the_cache():
    found = preset("evaluate", [*OWN, "cache=radix", "cache.layout.block_size=8", "engine.max_len=77", "caches=[x]"])
    assert (found.name, found.cfg.cache.layout.block_size, found.cfg.cache.memory) == ("paged", None, "64MiB")
    assert found.cfg.engine.max_len == 77


WRONG = {
    "[]": ([], r"caches=\[\] names no cache\n  valid: .*radix.*\n  fix: .*caches=null"),
    "typo": (
        ["pagged"],
        r"'pagged' names the preset 'pagged', which does not exist\n  valid: paged, .*caches=\[paged\]",
    ),
    "twice": (["paged", " paged "], "names 'paged' twice"),
    "number": ([3], "3 is neither a preset nor a text of overrides"),
    "blank": ([" "], "neither a preset nor"),
    "mapping": ({"paged": 1}, "is not a list"),
    "quotes": (["cache='paged"], "cannot be read: No closing quotation\n  fix: close the quotes"),
    "group": (["cache=radix cache/codec=int99"], r"'cache=radix cache/codec=int99'.*cache/codec=int99 does not exist"),
    "key": (["cache=paged cache.layout.size=1"], r"cache.layout has no key 'size'\n  valid: block_size"),
    "word": (["paged int8"], "has 'int8', which is not KEY=VALUE"),
    "model": (["paged model.dtype=bfloat16"], "sets model.dtype, which all caches have in common"),
    "packed": (["paged engine.pack_weights=false"], "sets engine.pack_weights, which all caches have in common"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_entry_is_named_with_what_is_valid(case):
    entries, message = WRONG[case]
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        lineup(entries, OWN)


def test_an_override_of_the_command_that_an_entry_cannot_take_is_named():
    with pytest.raises(ConfigError, match=r"'contiguous' \(under the command's own cache.layout.block_size=8\)"):
        lineup(["paged", "contiguous"], ["cache.layout.block_size=8"])


# -- in a job ------------------------------------------------------------------------------------------------


def test_a_job_finds_what_its_user_typed(monkeypatch, tmp_path):
    seen = []

    def job(cfg, run):
        seen.append((own_overrides(), [(c.name, c.cfg.cache.memory, c.cfg.text) for c in lineup(cfg.caches)]))
        return 0

    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/local.yaml").write_text("defaults:\n  - radix\n")
    monkeypatch.setattr(Command, "load", lambda self: job)
    arguments = ["evaluate", "caches=[local,'paged engine.max_len=9']", "cache.memory=1MiB", "text=f(x), ${y}"]
    assert main([*arguments, "--config-dir", str(tmp_path)]) == 0
    ((own, found),) = seen
    assert own[0] == "cache.memory=1MiB" and len(own) == 2
    assert found == [("local", "1MiB", "f(x), ${y}"), ("paged engine.max_len=9", "1MiB", "f(x), ${y}")]
    seen.clear()
    assert main(["evaluate", "-m", "caches=[paged]", "cache.memory=1MiB,2MiB"]) == 0
    assert [found[0][1] for _, found in seen] == ["1MiB", "2MiB"]


# -- building ------------------------------------------------------------------------------------------------


def test_engines_share_the_model_and_the_memory_of_one_is_gone_before_the_next():
    model, gone, outputs = random_model("tiny", "float32"), [], []
    for candidate in lineup(["paged", "radix", "contiguous engine.max_len=48"], [*OWN, "kernel=reference"]):
        assert all(ref() is None for ref in gone)
        with running(candidate, model) as engine:
            plane = engine.cache.storage.layers[0].k["payload"]
            gone += [weakref.ref(plane), weakref.ref(engine.cache.pools[0])]
            assert engine.max_len == (48 if "48" in candidate.name else model.max_len)
            request = Request(prompt_tokens=[5, 6, 7], sampling=SamplingParams(max_new_tokens=4))
            outputs.append(engine.generate([request])[0].output_tokens)
            del plane
    assert all(ref() is None for ref in gone) and model.running.cache is None
    assert outputs[0] == outputs[1] == outputs[2]


def test_a_cache_that_cannot_be_built_is_named(install):
    model = random_model("tiny", "float32")
    (small,) = lineup(["paged cache.memory=10"], OWN)
    with pytest.raises(CapacityError, match="'paged cache.memory=10': cache.memory=10 is 10 bytes"):
        with running(small, model):
            pass
    code = """
        from kvframe.interfaces import Layout
        class Odd(Layout):
            def block_size(self, max_len, unit=1): return 16
            def conflicts(self, others): return ["odd: cache/layout=paged"]
        """
    name = install("odd", code, files={"cache/layout/odd.yaml": "# Odd.\n_target_: kv_odd_module.Odd\n"})
    assert name == "kv_odd_module"
    (odd,) = lineup(["paged cache/layout=odd"], OWN)
    with pytest.raises(
        IncompatibleCacheError, match="(?s)'paged cache/layout=odd': .*odd: cache/layout=paged"
    ) as error:
        with running(odd, model):
            pass
    assert error.value.reasons == ("odd: cache/layout=paged",)
