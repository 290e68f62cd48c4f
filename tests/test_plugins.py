"""Plugins: loaded one at a time, broken ones reported by name, and nothing in kvframe knows the built-in ones."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import kvframe_plugins
import pytest
from omegaconf import OmegaConf

import kvframe
from kvframe import plugins as loading
from kvframe.cli import main
from kvframe.config import build_engine, build_kernels, compose, groups
from kvframe.configfiles import ConfigFolder
from kvframe.entrypoints import installed
from kvframe.errors import ConfigError, PluginError
from kvframe.testing import check_greedy, tiny_model, wrap
from kvframe.types import Request, SamplingParams

CODEC = {"cache/codec/mine.yaml": "_target_: kvframe_plugins.no_codec.NoCodec\n"}


def test_the_built_in_parts_arrive_through_an_entry_point():
    (plugin,) = [p for p in loading.plugins().loaded if p.distribution == "kvframe"]
    assert plugin.value == "kvframe_plugins" and plugin.config.url == "pkg://kvframe.conf" and plugin.error is None


def test_a_package_with_one_hook_and_one_yaml_file_is_a_plugin(install):
    install("mine", files=CODEC)
    assert "mine" in groups()["cache/codec"]
    assert compose(["cache/codec=mine"]).cache.codec._target_.endswith("NoCodec")
    (plugin,) = [p for p in loading.plugins().loaded if p.name == "mine"]
    assert (plugin.distribution, plugin.version) == ("kv-mine", "1.0") and plugin.seconds > 0


def test_a_config_path_may_be_a_folder(install, tmp_path):
    (tmp_path / "here/cache/codec").mkdir(parents=True)
    (tmp_path / "here/cache/codec/plain.yaml").write_text("_target_: kvframe_plugins.no_codec.NoCodec\n")
    code = f"@hookimpl\ndef kvframe_config_path():\n    return {str(tmp_path / 'here')!r}\n"
    install("folder", code, hook=False)
    assert compose(["cache/codec=plain"]).cache.codec._target_.endswith("NoCodec")


BROKEN = {
    "raises": ("raise RuntimeError('no luck today')", "no luck today"),
    "imports": ("import a_package_that_is_not_there", "a_package_that_is_not_there"),
    "hook": ("@hookimpl\ndef kvframe_confg_path():\n    return ''", "kvframe_confg_path.*kvframe_config_path"),
    "argument": (
        "@hookimpl\ndef kvframe_on_step(step, stat):\n    pass",
        "kvframe_on_step.*'stat'.*step, requests, tokens, seconds, stats",
    ),
    "default": (
        "@hookimpl\ndef kvframe_on_step(stats=None):\n    pass",
        "hook kvframe_on_step has a default for the argument 'stats'",
    ),
    "keyword": (
        "@hookimpl\ndef kvframe_on_finish(*, output):\n    pass",
        "hook kvframe_on_finish takes the argument 'output', by keyword only",
    ),
    "stars": ("@hookimpl\ndef kvframe_on_evict(**facts):\n    pass", r"kvframe_on_evict.*'\*\*facts'.*step, blocks"),
    "unmarked": ("def kvframe_on_step(stats):\n    pass", "hook kvframe_on_step is not marked.*@hookimpl"),
    "wrapper": (
        "@hookimpl(wrapper=True)\ndef kvframe_on_step(stats):\n    return (yield)",
        "hook kvframe_on_step is a wrapper",
    ),
    "coroutine": ("@hookimpl\nasync def kvframe_on_step(stats):\n    pass", "kvframe_on_step is a coroutine"),
    "exit": ("raise SystemExit(3)", "SystemExit: 3"),
    "api": ("api = 99", "interfaces 99.*interfaces 1"),
    "api text": ("api = '1'", "interfaces '1'.*interfaces 1"),
    "nowhere": ("@hookimpl\ndef kvframe_config_path():\n    return 'pkg://not.there'", "not.there.*does not exist"),
    "number": ("@hookimpl\ndef kvframe_config_path():\n    return 7", "answers 7"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_plugin_is_reported_and_the_others_work(install, case):
    code, reason = BROKEN[case]
    more = "@hookimpl\ndef kvframe_on_finish(output):\n    raise AssertionError('it was called')\n"
    more = "" if case in ("keyword", "exit", "raises", "imports", "nowhere", "number") else more
    install("broken", more + code, {"cache/codec/theirs.yaml": "_target_: x.y\n"})
    install("mine", files=CODEC)
    found = loading.plugins()
    (plugin,) = found.broken
    assert plugin.name == "broken" and re.search(reason, plugin.error, re.DOTALL), plugin.error
    assert compose(["cache/codec=mine"]).cache.codec
    # and it leaves no trace
    assert "theirs" not in groups()["cache/codec"] and not found.manager.has_plugin("broken")
    found.manager.hook.kvframe_on_finish(output=None)


@pytest.mark.parametrize("case", ["raises", "argument"])
def test_strict_makes_a_broken_plugin_fatal(install, monkeypatch, case):
    code, reason = BROKEN[case]
    install("broken", code)
    with pytest.raises(PluginError, match=rf"broken \(from kv-broken 1.0\)(?s:.*){reason}"):
        loading.Plugins.discover(strict=True)
    for value in ("1", "true"):
        monkeypatch.setenv("KVFRAME_STRICT", value)
        with pytest.raises(PluginError):
            loading.Plugins.discover()
    monkeypatch.setenv("KVFRAME_STRICT", "0")
    assert loading.Plugins.discover().broken
    monkeypatch.setenv("KVFRAME_STRICT", "maybe")
    with pytest.raises(PluginError, match=r"KVFRAME_STRICT='maybe'(?s:.*)valid: 1, 0"):
        loading.Plugins.discover()


def test_strict_names_all_that_is_broken(install):
    install("one", "raise ValueError('first')")
    install("two", "raise ValueError('second')")
    with pytest.raises(PluginError, match=r"one \(from kv-one 1.0\)(?s:.*)first(?s:.*)two \((?s:.*)second"):
        loading.Plugins.discover(strict=True)


def test_strict_on_the_command_line_and_in_compose(install, capsys):
    install("broken", "raise RuntimeError('no luck today')")
    for arguments in (["list", "--plugins", "strict=true"], ["generate", "strict=True", "--help"]):
        assert main(arguments) == 2
        assert "plugin broken (from kv-broken 1.0) is broken: RuntimeError: no luck" in capsys.readouterr().err
    with pytest.raises(PluginError, match="no luck today"):
        compose(["strict=true", "cache/codec=of_the_broken_one"])
    assert compose(["strict=false"]).strict is False
    assert main(["list", "--plugins", "strict=perhaps"]) == 2
    assert "strict=perhaps cannot be used\n  valid: true, false" in capsys.readouterr().err
    assert main(["list", "--plugins"]) == 0
    assert "broken: RuntimeError: no luck today" in " ".join(capsys.readouterr().out.split())


def test_two_plugins_with_one_file_are_an_error_that_names_both(install):
    install("one", files=CODEC)
    with pytest.raises(PluginError, match=r"one \(from kv-one 1.0\).*two \(from kv-two 1.0\).*cache/codec/mine.yaml"):
        install("two", files=CODEC)


def test_a_file_of_the_built_in_configs_cannot_be_taken_over(install):
    with pytest.raises(PluginError, match="builtin.*thief.*cache/layout/paged.yaml"):
        install("thief", files={"cache/layout/paged.yaml": "_target_: x.y\n"})


def test_two_packages_with_one_plugin_name_are_an_error_that_names_both(install):
    install("same", distribution="kv-a")
    with pytest.raises(PluginError, match="'same'.*kv-a 1.0 and kv-b 1.0"):
        install("same", distribution="kv-b")


def test_what_is_left_out_cannot_clash(install, monkeypatch):
    install("same", distribution="kv-a", files=CODEC)
    monkeypatch.setenv("KVFRAME_PLUGINS", "none")
    install("same", distribution="kv-b")
    install("other", files=CODEC)
    assert [plugin.name for plugin in loading.plugins().left_out] == ["other", "same", "same"]
    monkeypatch.setenv("KVFRAME_PLUGINS", "other")
    assert [plugin.name for plugin in loading.plugins(reload=True).loaded] == ["builtin", "other"]


def test_the_list_tells_what_from_where_and_how_long(install, monkeypatch, tmp_path):
    install("one", files=CODEC)
    install("two", "raise ValueError('broken')")
    install("three")
    monkeypatch.setenv("KVFRAME_PLUGINS", "one,two")
    loading.plugins(reload=True)
    monkeypatch.chdir(tmp_path)
    assert main(["list", "--plugins", "out=list.json"]) == 0
    found = json.loads(Path("list.json").read_text())
    rows = {row["name"]: row for row in found["plugins"]}
    assert [rows[name]["state"] for name in ("builtin", "one", "two", "three")] == [
        "in use", "in use", "broken: ValueError: broken", "left out by KVFRAME_PLUGINS",
    ]  # fmt: skip
    one = rows["one"]
    assert (one["distribution"], one["version"], one["module"]) == ("kv-one", "1.0", "kv_one_module")
    assert one["location"] == str(tmp_path / "kv-one/kv_one_module/__init__.py")
    assert one["config"] == "pkg://kv_one_module.conf" and rows["builtin"]["config"] == "pkg://kvframe.conf"
    assert found["seconds"] > one["seconds"] > 0 and rows["three"]["seconds"] == 0


def test_third_party_plugins_can_be_left_out(install, monkeypatch):
    install("one", files=CODEC)
    install("two")
    names = lambda: [p.name for p in loading.Plugins.discover().loaded]
    assert names() == ["builtin", "one", "two"]
    monkeypatch.setenv("KVFRAME_PLUGINS", "none")
    assert names() == ["builtin"]
    monkeypatch.setenv("KVFRAME_PLUGINS", "two")
    assert names() == ["builtin", "two"]
    monkeypatch.setenv("KVFRAME_PLUGINS", "tow")
    with pytest.raises(PluginError, match="'tow'(?s:.*)one, two"):
        names()


# -- entry points --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", ["console_scripts", "pytest11", "kvframe", "nobody_has_this"])
def test_entry_points_are_those_of_importlib_metadata(group):
    ours = {(point.name, point.value, point.distribution, point.version) for point in installed(group)}
    theirs = importlib.metadata.entry_points(group=group)
    assert ours == {(point.name, point.value, point.dist.name, point.dist.version) for point in theirs}


def test_entry_points_in_a_zip_and_in_an_egg_and_of_a_package_that_hides_another(tmp_path, monkeypatch):
    def package(folder: Path, info: str, name: str, version: str, point: str) -> None:
        (folder / info).mkdir(parents=True)
        head = "PKG-INFO" if info.endswith("egg-info") else "METADATA"
        (folder / info / head).write_text(f"Name: {name}\nVersion: {version}\n\nText: is no header\n")
        (folder / info / "entry_points.txt").write_text(f"[other]\nx = y\n\n[a_group]\n# words\n{point}\n[c]\nz = z\n")

    package(tmp_path / "a", "Some_Name-2.dist-info", "Some.Name", "2", "new = module:thing.inner [extra]")
    package(tmp_path / "b", "some_name-1.dist-info", "some-name", "1", "old = module")
    package(tmp_path / "b", "egg.egg-info", "egg", "3", "egg=egg_module")
    package(tmp_path / "z", "zipped-4.dist-info", "zipped", "4", "zip = zip_module")
    (tmp_path / "b/other-1.dist-info").mkdir()  # without any file
    with zipfile.ZipFile(tmp_path / "z.zip", "w") as file:
        for path in (tmp_path / "z").rglob("*"):
            file.write(path, path.relative_to(tmp_path / "z"))
        file.writestr("nameless.dist-info/entry_points.txt", "[c]\nz = z\n")
    monkeypatch.setattr(sys, "path", [*(str(tmp_path / name) for name in ("nowhere", "a", "b", "z.zip")), *sys.path])
    found = {point.name: point for point in installed("a_group")}
    assert set(found) == {"new", "egg", "zip"}
    assert (found["new"].distribution, found["new"].version, found["new"].module) == ("Some.Name", "2", "module")
    assert (found["egg"].version, found["zip"].version, found["zip"].value) == ("3", "4", "zip_module")


def test_an_entry_point_may_name_an_object_in_a_module(install, monkeypatch, tmp_path):
    code = "class Hooks:\n    @hookimpl\n    def kvframe_on_step(self, step):\n        pass\nhooks = Hooks()\n"
    install("thing", code)
    info = tmp_path / "kv-thing/kv_thing-1.0.dist-info/entry_points.txt"
    info.write_text("[kvframe]\nthing = kv_thing_module:hooks\n")
    assert loading.plugins(reload=True).manager.hook.kvframe_on_step.get_hookimpls()[0].plugin_name == "thing"
    info.write_text("[kvframe]\nthing = kv_thing_module:Hooks\n")
    (plugin,) = loading.plugins(reload=True).broken
    assert "it is the class Hooks; valid: a module, or an object" in plugin.error


# -- configs of plugins --------------------------------------------------------------------------------------

PRESETS = {
    "cache/codec/mycodec.yaml": "# My codec.\n_target_: kvframe_plugins.no_codec.NoCodec\n",
    "cache/mine.yaml": """\
        # Built on a preset of kvframe.
        defaults:
          - radix
          - override codec: mycodec
          - _self_
        memory: 4MiB
        layout: {block_size: 4}
    """,
    "cache/ours.yaml": """\
        # Built on the one above.
        defaults:
          - mine
          - override eviction: lfu
          - _self_
        num_blocks: 40
    """,
}


def editable(install, monkeypatch, tmp_path):
    """As setuptools installs a package in place: its folder is not on the path, a finder knows where it is."""
    module = install("presets", files=PRESETS)
    root = tmp_path / "kv-presets"
    (tmp_path / "elsewhere").mkdir()
    (root / module).rename(tmp_path / "elsewhere" / module)

    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name.split(".")[0] != module:
                return None
            place = tmp_path / "elsewhere" / name.replace(".", "/") / "__init__.py"
            return importlib.util.spec_from_file_location(name, place) if place.exists() else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    for name in [name for name in sys.modules if name.startswith(module)]:
        del sys.modules[name]
    importlib.invalidate_caches()
    loading.plugins(reload=True)


@pytest.mark.parametrize("how", ["wheel", "editable"])
def test_a_preset_may_build_on_those_of_kvframe(how, install, monkeypatch, tmp_path, capsys):
    install("presets", files=PRESETS) if how == "wheel" else editable(install, monkeypatch, tmp_path)
    radix, mine, ours = (compose([f"cache={name}"]).cache for name in ("radix", "mine", "ours"))
    assert mine.codec._target_.endswith("NoCodec") and (mine.memory, mine.layout.block_size) == ("4MiB", 4)
    assert mine.index == radix.index and mine.eviction == radix.eviction != ours.eviction
    assert ours.codec == mine.codec and (ours.memory, ours.num_blocks) == ("4MiB", 40)
    assert compose(["cache=mine", "cache/codec=none", "cache/eviction=lfu"]).cache.eviction == ours.eviction
    assert main(["generate", "cache=ours", "--help"]) == 0
    text = capsys.readouterr().out
    for shown in ("mine, ", "ours*", "mycodec*", "lfu*", "radix*", "cache.memory=4MiB", "cache.layout.block_size=4 "):
        assert shown in text
    assert "cache.num_blocks=40 " in text and "cache.eviction.memory=64" in text and "=null  " in text
    with pytest.raises(ConfigError, match=r"cache=mien does not exist\n  valid: mine, (?s:.*)fix: cache=mine"):
        compose(["cache=mien"])
    with pytest.raises(ConfigError, match=r"cache/codec=mycodek does not exist\n  valid: mycodec, "):
        compose(["cache/codec=mycodek"])


def test_a_preset_of_a_plugin_is_swept(install, monkeypatch, tmp_path):
    install("presets", files=PRESETS)
    monkeypatch.chdir(tmp_path)
    tiny = ["model=random", "kernel=reference", "engine.max_len=64", "sampling.max_new_tokens=3", "prompt=hi"]
    assert main(["generate", "-m", "cache=radix,mine,ours", "cache.num_blocks=32", *tiny, "out=run.json"]) == 0
    (index,) = tmp_path.glob("multirun/*/*/sweep.json")
    jobs = json.loads(index.read_text())["jobs"]
    assert [job["overrides"][0] for job in jobs] == ["cache=radix", "cache=mine", "cache=ours"]
    texts = {json.loads((index.parent / job["out"]).read_text())["requests"][0]["text"] for job in jobs}
    assert len(texts) == 1


def test_one_config_builds_engines_for_two_models_and_stays_as_it_is(install):
    install("presets", files=PRESETS)
    cfg = compose(["cache=ours", "kernel=reference", "engine.max_len=64", "watch=none"])
    before = OmegaConf.to_yaml(cfg)
    OmegaConf.set_readonly(cfg, True)
    for arch in ("llama", "gemma2", "llama"):
        model = tiny(arch)
        engine = build_engine(cfg, model)
        request = Request(prompt_tokens=list(range(3, 25)), sampling=SamplingParams(max_new_tokens=5, ignore_eos=True))
        (output,) = engine.generate([request])
        assert check_greedy(model.module, output.prompt_tokens, output.output_tokens) > 0
        assert engine.cache.context.layers == model.layers
    assert OmegaConf.to_yaml(cfg) == before


@functools.cache
def tiny(arch: str):
    return wrap(tiny_model(arch))


# -- hooks and kernels ---------------------------------------------------------------------------------------


def test_watch_hooks_reach_every_plugin(install):
    install("watch", "seen = []\n@hookimpl\ndef kvframe_on_step(stats):\n    seen.append(stats)\n")
    manager = loading.plugins().manager
    manager.hook.kvframe_on_step(step=3, requests=1, tokens=5, seconds=0.1, stats={"tokens": 5})
    assert manager.get_plugin("watch").seen == [{"tokens": 5}]


def test_kernels_of_plugins_are_candidates_and_a_broken_one_is_left_out(install, caplog):
    caplog.set_level("INFO")
    kernel = "kvframe.kernels.reference.ReferenceKernel"
    install(
        "kernels",
        files={
            "kernel/first.yaml": f"_target_: {kernel}\npriority: 1000\n",
            "kernel/gone.yaml": "_target_: a_package_that_is_not_there.Kernel\npriority: 2000\n",
            "kernel/silent.yaml": "_target_: a_package_that_is_not_there.Kernel\n",
        },
    )
    kernels = build_kernels(compose(["kernel=auto"]))
    assert kernels[0].name == kernels[-1].name == "reference" and len(kernels) >= 2
    assert "gone" in caplog.text and "a_package_that_is_not_there" in caplog.text and "silent" not in caplog.text
    assert len(build_kernels(compose(["kernel=first"]))) == 1


def test_discovery_is_light():
    """It imports nothing heavy, opens one small file of each installed package and none of the YAML files. That is what
    keeps it under 5 ms; `kvframe list --plugins` tells how long it took here."""
    code = """
import sys
import kvframe.plugins
opened, before = [], set(sys.modules)
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
kvframe.plugins.plugins()
heavy = ("torch", "hydra", "transformers", "numpy", "yaml", "importlib.metadata", "email")
assert not [name for name in heavy if name in sys.modules], sorted(sys.modules)
assert [name for name in set(sys.modules) - before] == ["kvframe_plugins"], set(sys.modules) - before
assert not [path for path in opened if path.endswith((".yaml", "RECORD"))], opened
assert len([path for path in opened if path.endswith("METADATA")]) == 1, opened
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["KVFRAME_PLUGINS"] = "none"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


# -- nothing in kvframe knows the built-in parts ---------------------------------------------------------------

ROOT = Path(kvframe.__file__).parent
# Built-in parts whose name is a word that means something else in kvframe as well:
WORDS = {"none", "model", "mixed"}  # everyday words
WORDS |= {"int8", "int4", "int2", "fp8", "nf4"}  # number formats
WORDS |= {"bitsandbytes"}  # a library, which also quantizes weights
ATTRIBUTES = {"contiguous"}  # a method of tensors
KEYS = {"sliding_window"}  # a key of transformers' model configs, in the files that make or read such configs
CONFIGS = {"shapes.py", "models.py", "shrink.py", "hints.py"}


def builtin_names() -> set[str]:
    """Folders of plugins/, and what the config files of caches, parts and watchers are called."""
    plugins = {path.parent.name for path in Path(kvframe_plugins.__file__).parent.glob("*/__init__.py")}
    folder = ConfigFolder("pkg://kvframe.conf", "builtin")
    files = {file.name for group in ("cache", "watch") for file in folder.walk(group)}
    return (plugins | files) - WORDS


def words_of(path: Path):
    """(line, kind, words) of every text and name in a file that is code; not of comments and docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docs = {
        id(node.body[0].value) for node in ast.walk(tree) if isinstance(node, documented) and ast.get_docstring(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.lineno, "text", set(re.findall(r"[a-z_0-9]+", node.value))
        names = {"attribute": [getattr(node, "attr", None)]} if isinstance(node, ast.Attribute) else {}
        names["name"] = [getattr(node, field, None) for field in ("id", "arg", "name", "asname")]
        for kind, found in names.items():
            for name in filter(lambda name: isinstance(name, str), found):  # PagedThing, a.paged_thing -> paged, thing
                plain = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
                parts = [part for part in re.split(r"[._]+", plain) if part]
                spans = {"_".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1)}
                yield getattr(node, "lineno", 0), kind, spans


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_kvframe_does_not_know_the_built_in_parts(path):
    if "testing" not in path.parts:
        assert "kvframe_plugins" not in path.read_text(encoding="utf-8")
    names = builtin_names() - (KEYS if path.name in CONFIGS else set())
    for line, kind, words in words_of(path):
        found = (names & words) - (ATTRIBUTES if kind == "attribute" else set())
        assert not found, f"line {line} names {found} ({kind})"


def test_the_rule_finds_a_name_wherever_it_stands(tmp_path):
    code = '''"""radix in a docstring"""  # lru in a comment
from a import half_life_of as b
x = choose("cache=paged")
class LFUThing: pass
def f(radix=1): return x.sliding_window, x.contiguous()
'''
    (tmp_path / "code.py").write_text(code)
    found = {name for _, _, words in words_of(tmp_path / "code.py") for name in words & builtin_names()}
    assert found == {"half_life", "lfu", "paged", "radix", "sliding_window", "contiguous"}
