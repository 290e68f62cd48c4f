"""Plugins: loaded one at a time, broken ones reported by name, and nothing in kvframe knows the built-in ones."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvframe
from kvframe import plugins as loading
from kvframe.config import build_kernels, compose, groups
from kvframe.configfiles import ConfigFolder
from kvframe.errors import PluginError

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
    "api": ("api = 99", "interfaces 99.*interfaces 1"),
    "nowhere": ("@hookimpl\ndef kvframe_config_path():\n    return 'pkg://not.there'", "not.there.*does not exist"),
    "number": ("@hookimpl\ndef kvframe_config_path():\n    return 7", "answers 7"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_plugin_is_reported_and_the_others_work(install, case):
    code, reason = BROKEN[case]
    install("broken", code)
    install("mine", files=CODEC)
    (plugin,) = loading.plugins().broken
    assert plugin.name == "broken" and re.search(reason, plugin.error, re.DOTALL), plugin.error
    assert compose(["cache/codec=mine"]).cache.codec


@pytest.mark.parametrize("case", ["raises", "argument"])
def test_strict_makes_a_broken_plugin_fatal(install, monkeypatch, case):
    code, reason = BROKEN[case]
    install("broken", code)
    with pytest.raises(PluginError, match=rf"broken \(from kv-broken 1.0\)(?s:.*){reason}"):
        loading.Plugins.discover(strict=True)
    monkeypatch.setenv("KVFRAME_STRICT", "1")
    with pytest.raises(PluginError):
        loading.Plugins.discover()


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
    code = (
        "import sys, kvframe.plugins as p; p.plugins();"
        "print([m for m in ('torch', 'hydra', 'transformers', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# -- nothing in kvframe knows the built-in parts ---------------------------------------------------------------

ROOT = Path(kvframe.__file__).parent
GENERAL = {"none", "model", "base"}  # words that are not names of parts only


def builtin_names() -> set[str]:
    files = ConfigFolder("pkg://kvframe.conf", "builtin").walk("cache")
    dtypes = {"int8", "fp8", "nf4"}  # words of their own: number formats are not parts
    return {file.name for file in files} - GENERAL - dtypes


MODEL_CONFIGS = {"shapes.py", "models.py"}  # there "sliding_window" is a key of transformers' model configs


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_kvframe_does_not_know_the_built_in_parts(path):
    source = path.read_text(encoding="utf-8")
    if "testing" not in path.parts:
        assert "kvframe_plugins" not in source
    tree = ast.parse(source)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docs = {
        id(node.body[0].value) for node in ast.walk(tree) if isinstance(node, documented) and ast.get_docstring(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            found = builtin_names() & set(re.findall(r"[a-z_0-9]+", node.value))
            found -= {"sliding_window"} if path.name in MODEL_CONFIGS else set()
            assert not found, f"line {node.lineno} names {found}"
