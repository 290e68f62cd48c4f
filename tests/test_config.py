"""compose() and build(): names that do not exist, parts that are swapped, texts that arrive as they were written."""

from __future__ import annotations

import dataclasses

import hydra
import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.version import VersionBase
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from kvframe.config import build_cache, build_kernels, build_model, cache_context, compose, files, groups, plain
from kvframe.create import create
from kvframe.errors import CapacityError, ConfigError, MissingPackageError
from kvframe.overrides import TEXT_KEYS, quote
from kvframe.types import LayerSpec, SamplingParams

PARTS = {"layout", "index", "eviction", "retention", "codec"}


class Model:
    """What build() asks of a model."""

    layers = (LayerSpec(0, q_heads=4, kv_heads=2, k_dim=16, v_dim=16, scale=0.25),)
    dtype, device, max_len, learned_sinks = "float32", "cpu", 128, {}


def cache_of(*overrides: str):
    cfg = compose(list(overrides))
    return build_cache(cfg, cache_context(cfg, Model))


# -- what is there -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", groups()["cache"])
def test_every_preset_lists_five_parts_and_the_common_keys(preset):
    cache = compose([f"cache={preset}"]).cache
    assert set(cache) >= PARTS | {"memory", "num_blocks", "group_share"}
    assert all("_target_" in cache[part] for part in PARTS)


@pytest.mark.parametrize("file", [f for f in files() if f.group and f.group != "base"], ids=lambda f: f.path)
def test_every_config_file_says_what_it_is_and_what_each_key_means(file):
    assert file.headline
    keys = {
        k: c for k, c in file.comments().items() if k not in ("defaults", "auto", "priority") and not k.startswith("_")
    }
    assert all(keys.values()), [key for key, comment in keys.items() if not comment]


def test_the_base_of_the_presets_cannot_be_chosen():
    assert "base" not in groups() and "base" not in groups()["cache"]
    with pytest.raises(ConfigError, match="cache=base does not exist"):
        compose(["cache=base"])


def test_sampling_config_mirrors_sampling_params():
    assert SamplingParams(**plain(compose(), "sampling")) == SamplingParams()
    assert set(compose().sampling) == {field.name for field in dataclasses.fields(SamplingParams)}


def test_engine_config_mirrors_the_engine():
    import inspect

    from kvframe.engine import Engine

    takes = {n for n, p in inspect.signature(Engine.__init__).parameters.items() if p.kind is p.KEYWORD_ONLY}
    assert set(compose().engine) == takes - {"hooks"}  # those come from the plugins


# -- compose -------------------------------------------------------------------------------------------------


def test_parts_and_presets_are_swapped_by_overrides():
    assert compose(["cache=paged", "cache.layout.block_size=1"]).cache.layout.block_size == 1
    assert (
        compose(["cache=paged", "cache/layout=contiguous"]).cache.layout == compose(["cache=contiguous"]).cache.layout
    )
    assert compose(["cache=contiguous", "cache/layout=paged"]).cache == compose(["cache=paged"]).cache
    assert compose(["cache=paged", "cache.memory=2GiB"]).cache.memory == "2GiB"


TYPOS = {
    "cache=pagged": r"cache=pagged does not exist\n  valid: paged, .*\n  fix: cache=paged",
    "cache/layout=page": r"cache/layout=page does not exist\n  valid: paged, ",
    "cache/codec=int9": r"cache/codec=int9 does not exist\n  valid: .*none",
    "model=smolm2": r"model=smolm2 does not exist\n  valid: smollm2, .*\n  fix: model=smollm2",
    "kernel=refrence": r"kernel=refrence does not exist\n  valid: reference, ",
    "cach=paged": r"no key 'cach'\n  valid: cache, .*\n  fix: cache=paged",
    "cache/codex=none": r"config group 'cache/codex' does not exist\n  valid: cache/codec, .*\n  fix: cache/codec=none",
    "cache.layout.blocksize=16": r"no key 'blocksize'\n  valid: block_size\n  fix: cache.layout.block_size=16",
    "cache.memory='x": r"\"cache.memory='x\" cannot be read",
    "sampling.temprature=1": r"sampling has no key 'temprature'\n  valid: temperature, ",
    "cache=paged,contiguous": r"several values\n  fix: add -m",
    "engine.max_len=[1": r"'engine.max_len=\[1' cannot be read",
    "prompt": "'prompt' cannot be read",
    "~nothing": "no key 'nothing'",
    "engine@x=default": "replaces nothing",
}


@pytest.mark.parametrize("override", TYPOS)
def test_a_typo_is_answered_with_the_valid_names(override):
    with pytest.raises(ConfigError, match=TYPOS[override]):
        compose([override])


def test_a_key_of_a_part_that_was_not_chosen():
    with pytest.raises(ConfigError, match="cache.layout has no key 'block_size'.*takes no parameters"):
        compose(["cache=contiguous", "cache.layout.block_size=16"])


def test_a_text_instead_of_a_list_of_overrides():
    with pytest.raises(ConfigError, match="is one text"):
        compose("cache=paged")


def test_a_command_that_does_not_exist():
    with pytest.raises(ConfigError, match="no config 'generat'"):
        compose([], "generat")


def test_compose_leaves_the_hydra_of_an_application_alone(tmp_path):
    (tmp_path / "app.yaml").write_text("x: 1\n")
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(tmp_path), version_base="1.2"):
        before, version = GlobalHydra.instance().hydra, VersionBase.instance().version_base
        assert compose().cache and compose(["cache=contiguous"]).cache
        assert GlobalHydra.instance().hydra is before and VersionBase.instance().version_base == version
        assert hydra.compose("app").x == 1
        # and the application finds our configs
        assert "block_size" in hydra.compose("app", overrides=["+cache=paged"]).cache.layout


# -- build ---------------------------------------------------------------------------------------------------


def test_two_caches_are_built_from_one_config_which_stays_as_it_was():
    cfg = compose(["cache=paged", "cache.num_blocks=8"])
    before = OmegaConf.to_yaml(cfg)
    context = cache_context(cfg, Model)
    one, two = build_cache(cfg, context), build_cache(cfg, context)
    assert one is not two and one.parts.layout is not two.parts.layout
    assert OmegaConf.to_yaml(cfg) == before


def test_lengths_come_from_the_model_unless_the_engine_says_otherwise():
    assert cache_context(compose(), Model).max_len == 128
    assert cache_context(compose(["engine.max_len=32"]), Model).max_len == 32
    assert cache_of("cache=contiguous", "engine.max_len=32", "cache.num_blocks=2").block_size == 32


WRONG = {
    (
        "+cache.layout.blocksize=16",
    ): r"cache.layout has no parameter 'blocksize' \(Paged\)\n  valid: block_size\n  fix: cache.layout.block_size",
    ("+cache.momory=1",): r"cache has no parameter 'momory' \(BlockKVCache\)\n  valid: memory, ",
    (
        "cache.layout=contiguous",
    ): r"puts a value where a part belongs\n  valid: contiguous, .*\n  fix: cache/layout=contiguous",
    ("~cache/layout",): "cache.layout must be given",
    (
        "cache.layout._target_=kvframe.nothing.Layout",
    ): "cache.layout._target_=kvframe.nothing.Layout cannot be imported",
    ("cache.layout.block_size=0",): "cache.layout.block_size=0 cannot be used",  # the part's own words
    ("cache.layout.block_size=${nowhere}",): "cache.layout.block_size cannot be resolved",
    ("cache.memory=lots",): "cache.memory='lots'",
    ("engine.max_len=long",): "engine.max_len='long' cannot be used",
    ("engine.max_requests=0",): "engine.max_requests=0 cannot be used",
    ("engine.max_len=${nowhere}",): "engine cannot be resolved",
}


@pytest.mark.parametrize("overrides", WRONG, ids=" ".join)
def test_wrong_parameters_are_named(overrides):
    with pytest.raises(ConfigError, match=WRONG[overrides]):
        cache_of(*overrides)


def test_an_error_of_our_family_surfaces_as_it_is():
    with pytest.raises(CapacityError, match="cache.memory=10"):
        cache_of("cache.memory=10")


def test_a_missing_value_is_named():
    with pytest.raises(ConfigError, match=r"model.name must be given\n  fix: model.name="):
        build_model(compose(["model=hf"]))


def test_a_target_that_does_not_exist_is_named():
    node = OmegaConf.create({"_target_": "kvframe_plugins.paged.nothing"})
    with pytest.raises(ConfigError, match="cannot be imported"):
        create(node, "x")


def test_a_missing_dependency_of_a_part_is_named(tmp_path, monkeypatch):
    (tmp_path / "needy.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(MissingPackageError, match="needs the package 'a_package_that_is_not_there'"):
        create(OmegaConf.create({"_target_": "needy.Part"}), "cache.codec")


def test_kernels_come_in_order_of_their_priority():
    names = [kernel.name for kernel in build_kernels(compose())]
    assert names[-1] == "reference" and len(names) > 1
    assert [kernel.name for kernel in build_kernels(compose(["kernel=reference"]))] == ["reference"]


# -- free text -----------------------------------------------------------------------------------------------

TRICKY = [
    "Hello, what's new?", "f(x) = {x}", "a=b", "${x}", "\\${x}", "\\\\${x}", "${", "$", "\\", "\\\\", "'", '"', "\\'",
    "42", "1e3", "null", "true", "nan", "", " lead and trail ", "line\nline\ttab\r\n", "[1, 2]", "{a: 1}", "a,b", "???",
    "choice(1,2)", "range(3)", "*", "~x", "+x", "@", "#", ":", "% $ & | ; < >", "日本語 🙂", "a\\,b", "prompt='x'",
]  # fmt: skip
texts = st.one_of(st.text(), st.text(alphabet="\\'\"${}a ,=()[]\n:?#~\t@", max_size=12))


def arrives(key: str, text: str):
    """The value that Hydra's parser and OmegaConf make of an override, run once more as a sweep does."""
    override = OverridesParser.create().parse_override(quote([f"{key}={text}"])[0])
    assert not override.is_sweep_override()
    again = OverridesParser.create().parse_override(
        f"{override.get_key_element()}={override.get_value_element_as_str()}"
    )
    cfg = OmegaConf.create({})
    OmegaConf.update(cfg, "x", again.value())
    assert OmegaConf.to_container(cfg, resolve=True)["x"] == cfg.x
    return cfg.x


@settings(max_examples=200, deadline=None)
@given(texts)
@example("???")
@example("\\\\${a\\'}")
def test_any_text_arrives_unchanged(text):
    assert arrives("prompt", text) == text
    assert arrives("++prompt", text) == text


@pytest.mark.parametrize("text", TRICKY)
def test_known_difficult_texts_arrive(text):
    assert arrives("prompt", text) == text


@pytest.mark.parametrize("text", ["Hello, what's new?", "f(x) = {x}, ${y}\n", "???", "42", "null", ""])
def test_texts_arrive_through_compose(text):
    cfg = compose([f"prompt={text}"])
    assert cfg.prompt == text and OmegaConf.to_container(cfg, resolve=True)["prompt"] == text


OF_COMMANDS = {
    "trace": ["simulate"], "plot": ["evaluate"], "text": ["evaluate"], "model.name": ["generate", "model=hf"],
    "workload.path": ["compare", "workload=file"],
}  # fmt: skip


@pytest.mark.parametrize("key", sorted(TEXT_KEYS))
def test_every_text_key_is_quoted(key):
    command, *choice = OF_COMMANDS.get(key, ["generate"])
    value = OmegaConf.select(compose([*choice, f"{key}=a, b=${{c}}"], command), key)
    assert value == "a, b=${c}"


def test_null_means_none_for_paths_and_is_a_word_in_a_prompt():
    cfg = compose(["out=null", "sampling.stop=null", "prompt=null"])
    assert cfg.out is None and cfg.sampling.stop is None and cfg.prompt == "null"


def test_stop_is_a_text_or_a_list():
    stop = lambda text: plain(compose([f"sampling.stop={text}"]), "sampling")["stop"]
    assert stop("a, b") == "a, b"
    assert stop('["a, b","c"]') == ["a, b", "c"]
    assert stop("[x") == "[x" and stop("[INST]") == ["INST"]
    assert stop("[a, 'b]") == "[a, 'b]"


def test_text_that_is_not_unicode_is_refused():
    with pytest.raises(ConfigError, match="not valid UTF-8"):
        compose(["prompt=caf\udce9"])
