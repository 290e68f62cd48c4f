"""`kvframe new`: what it writes works at once, for each kind, and what it cannot write it says."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import yaml
from installed import metadata

import kvframe
from kvframe import plugins as loading
from kvframe.cli import main
from kvframe.config import build_cache, build_engine, cache_context, compose, groups
from kvframe.scaffold import files, kinds, words, write
from kvframe.testing import check_greedy, tiny_model, wrap
from kvframe.testing.harness import poison_free
from kvframe.types import Request, SamplingParams

KINDS = ("cache", "codec", "eviction", "index", "kernel", "layout", "retention")
ROOT = Path(kvframe.__file__).parent
SMALL = ["engine.max_len=128", "engine.clock=virtual", "engine.max_step_tokens=48"]
MODELS = {"index": ("llama", "gemma2"), "cache": ("llama", "gemma2", "gpt_oss", "gemma3n")}  # where a model can matter
SHORT = {"eviction": ["cache.layout.block_size=4", "cache.num_blocks=24"]}


@pytest.fixture
def new(tmp_path, editable):
    """`new(kind)`: writes a package `mine`, and makes it importable as `pip install -e` would; answers its folder."""

    def make(kind: str, name: str = "mine") -> Path:
        assert main(["new", name, "--kind", kind, "--out", str(tmp_path)]) == 0
        editable(tmp_path / name)
        return tmp_path / name

    return make


@pytest.fixture(scope="module")
def models():
    return functools.cache(lambda arch: wrap(tiny_model(arch)))


def prompts() -> list[list[int]]:
    draw = np.random.default_rng(0)
    shared = draw.integers(3, 250, 37).tolist()
    return [shared + draw.integers(3, 250, n).tolist() for n in (1, 9, 20)] + [draw.integers(3, 250, 40).tolist()]


def run(engine, requests: list[list[int]]) -> list:
    """Decodes in a cache whose free blocks are poisoned, and checks it after every step."""
    sampling = SamplingParams(max_new_tokens=10, ignore_eos=True)
    for i, prompt in enumerate(requests):
        engine.add(Request(prompt_tokens=prompt, id=f"{i}", sampling=sampling))
    done = {}
    while engine.has_work:
        if hasattr(engine.cache, "storage"):
            poison_free(engine.cache)
        done |= {event.id: event.output for event in engine.step() if event.output is not None}
        engine.cache.check()
    assert engine.cache.stats().total("reserved") == 0
    return [done[f"{i}"] for i in range(len(requests))]


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file below a folder but compiled ones -> size and time of its last change."""
    found = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime_ns) for path in found}


# -- what is written works -----------------------------------------------------------------------------------


def test_these_are_the_kinds():
    assert tuple(kinds()) == KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_part_decodes_at_once(kind, new, models):
    new(kind)
    said = words("mine", kind)
    overrides = [*said["use"].split(), *said["small"].split(), *SHORT.get(kind, ()), *SMALL]
    for arch in MODELS.get(kind, ("llama",)):
        engine = build_engine(compose(overrides), models(arch))
        outputs = run(engine, [*prompts(), *prompts()])
        for prompt, output in zip([*prompts(), *prompts()], outputs):
            assert len(output.output_tokens) == 10
            if engine.cache.exact:
                assert check_greedy(models(arch).module, prompt, output.output_tokens) > 0
        assert engine.cache.exact is (kind not in ("codec", "retention"))
        if kind == "index":
            assert engine.cache.hit_tokens > 100
        if kind == "eviction":
            assert engine.cache.evictions > 0


def test_what_cannot_be_served_is_said(new, models):
    new("kernel")
    with pytest.raises(kvframe.KVFrameError, match=r"(?s)kernel mine: it knows no softcap"):
        build_engine(compose(["kernel=mine", *SMALL]), models("gemma2"))


@pytest.mark.parametrize("retention", ["retention", "index"])
def test_a_new_index_and_a_new_retention_compose(retention, new, models):
    """Windows make holes in what is cached; with few blocks the index evicts."""
    new(retention)
    overrides = ["cache/index=mine" if retention == "index" else "cache/index=radix", "cache.num_blocks=26"]
    overrides += ["cache/retention=mine" if retention == "retention" else "cache/retention=sliding_window"]
    engine = build_engine(
        compose([*overrides, "cache.retention.window=12", "cache.layout.block_size=4", "kernel=reference", *SMALL]),
        models("llama"),
    )
    outputs = run(engine, [*prompts(), *prompts()])
    for prompt, output in zip([*prompts(), *prompts()], outputs):
        assert check_greedy(models("llama").module, prompt, output.output_tokens, engine.cache.parts.retention) > 0
    assert engine.cache.hit_tokens and engine.cache.evictions


def test_a_new_cache_is_simulated_without_a_model_and_without_torch(new, tmp_path):
    folder = new("cache")
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}\n' * 3)
    code = (
        f"import sys; sys.path.insert(0, {str(folder)!r}); from kvframe.cli import main\n"
        f"code = main(['simulate', 'trace={trace}', 'mode=engine', 'cache=mine', 'engine.max_requests=2'])\n"
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode in (0, 2) and "Traceback" not in done.stderr, done.stderr
    assert "torch" not in done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_no_module_of_a_part_is_imported_before_it_is_chosen(kind, new, capsys):
    new(kind)
    said = words("mine", kind)
    compose(said["use"].split())
    main(["generate", *said["use"].split(), "--help"])
    main(["list", "--plugins"])
    assert "mine*" in capsys.readouterr().out and "mine" in groups()[said["group"]]
    assert "kvframe_mine" in sys.modules and f"kvframe_mine.{kind}" not in sys.modules


def test_a_codec_costs_forty_lines_of_python_and_five_of_yaml():
    made = files("mine", "codec")
    count = lambda ending: sum(
        text.count("\n") for path, text in made.items() if path.startswith("kvframe_mine") and path.endswith(ending)
    )
    assert count(".py") <= 40 and count(".yaml") <= 5


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_whole_and_plain(kind):
    made = files("a_name", kind)
    for path, text in made.items():
        assert "$" not in text, path
        assert path == "README.md" or all(len(line) <= 120 for line in text.splitlines()), path
        if path.endswith(".py"):
            compile(text, path, "exec")
    said = words("a_name", kind)
    target = yaml.safe_load(made[f"kvframe_a_name/conf/{said['group']}/a_name.yaml"])["_target_"]
    assert target == f"kvframe_a_name.{kind}.AName" and "class AName(" in made[f"kvframe_a_name/{kind}.py"]
    assert f"class TestAName({said['Contract']})" in made["tests/test_a_name.py"]
    commands = made["README.md"].split("```")[1].strip().splitlines()
    assert len(commands) == 5 and said["use"] in commands[2]


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_that_the_template_uses_is_no_class_of_its_own(kind):
    for name in ("codec", "retention", "layout", "ranked", "kernel", "prefix_index", "block", "k_v_cache"):
        text = files(name, kind)[f"kvframe_{name}/{kind}.py"]
        assert text.count(f"class {words(name, kind)['Class']}(") == 1
        compile(text, name, "exec")


# -- what is refused -----------------------------------------------------------------------------------------

REFUSED = {
    "no name": ([], "the part has no name\n  fix: kvframe new mine --kind codec"),
    "no kind": (["mine"], "mine: which kind of part?\n  valid: cache, codec, eviction"),
    "kind": (["mine", "--kind", "codex"], "--kind codex does not exist\n  valid: codec, "),
    "dash": (["my-codec", "--kind", "codec"], "'my-codec' cannot be the name of a part"),
    "fix": (["My Codec", "--kind=codec"], "fix: kvframe new my_codec"),
    "digit": (["4bit", "--kind", "codec"], "fix: kvframe new my_4bit"),
    "python": (["class", "--kind", "codec"], "fix: kvframe new my_class"),
    "yaml": (["null", "--kind", "codec"], "'null' cannot be the name of a part"),
    "path": (["../mine", "--kind", "codec"], "'../mine' cannot be the name of a part"),
    "part": (["lru", "--kind", "eviction"], "cache/eviction=lru is there already: the plugin builtin"),
    "preset": (["radix", "--kind", "cache"], "cache=radix is there already: the plugin builtin"),
    "plugin": (["builtin", "--kind", "codec"], "a plugin is called builtin already"),
    "module": (["plugins", "--kind", "codec"], "a module kvframe_plugins is installed already"),
    "value": (["mine", "--kind"], "--kind needs a value"),
    "two": (["mine", "yours", "--kind", "codec"], "'yours' is not KEY=VALUE"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_and_nothing_is_written(case, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments, message = REFUSED[case]
    assert main(["new", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_there_is_left_alone(tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    assert main(["new", "mine", "--kind", "codec", "--out", str(tmp_path)]) == 2
    assert f"{tmp_path / 'mine'} is there already\n  fix: another name" in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["mine"]
    assert main(["new", "name=mine", "kind=codec", f"out={tmp_path / 'deep/er'}"]) == 0
    assert (tmp_path / "deep/er/mine/pyproject.toml").is_file()


def test_hydra_s_own_flags_stand_anywhere(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["new", "--cfg", "job", "mine", "--kind=codec"]) == 0
    text = capsys.readouterr().out
    assert "name: mine" in text and "kind: codec" in text and list(tmp_path.iterdir()) == []
    assert main(["new", "-m", "name=mine,yours", "--kind", "codec"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "yours"]


def test_a_name_that_another_plugin_has(new, capsys, tmp_path):
    new("codec")
    other = ["--out", str(tmp_path / "other")]
    assert main(["new", "mine", "--kind", "codec", *other]) == 2
    assert "cache/codec=mine is there already: the plugin mine (from kvframe-mine 0.1.0)" in capsys.readouterr().err
    assert main(["new", "mine", "--kind", "index", *other]) == 2
    assert "a plugin is called mine already: mine (from kvframe-mine 0.1.0)" in capsys.readouterr().err


def test_a_wrong_parameter_names_its_key(new, models):
    new("retention")
    with pytest.raises(kvframe.KVFrameError, match=r"cache.retention.window=0 (?s:.*)fix: cache.retention.window=256"):
        cfg = compose(["cache/retention=mine", "cache.retention.window=0"])
        build_cache(cfg, cache_context(cfg, models("llama")))


# -- as people do it -----------------------------------------------------------------------------------------


@pytest.fixture
def site(tmp_path):
    """A copy of kvframe, as a wheel would lie there, that nobody may write to."""
    site = tmp_path / "site"
    for name, place in (("kvframe", "kvframe"), ("plugins", "kvframe_plugins"), ("conf", "kvframe/conf")):
        shutil.copytree(ROOT.parent / name, site / place, ignore=shutil.ignore_patterns("__pycache__"))
    metadata(site, "kvframe", kvframe.__version__, "builtin = kvframe_plugins")
    _writable(site, False)
    before = snapshot(site)
    yield site
    assert snapshot(site) == before
    _writable(site, True)


def _writable(folder: Path, yes: bool) -> None:
    for path in (folder, *folder.rglob("*")):
        path.chmod((0o755 if yes else 0o555) if path.is_dir() else (0o644 if yes else 0o444))


def call(*command, cwd: Path, path: list[Path]) -> str:
    """Runs a program that imports from these folders first."""
    places = {"PYTHONPATH": os.pathsep.join(map(str, path)), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command, environment = [str(part) for part in command], {**os.environ, **places}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_all_kinds_beside_a_kvframe_that_nobody_may_write_to(site, tmp_path):
    for kind in KINDS:
        write(f"my_{kind}", kind, tmp_path, loading.plugins())
        metadata(tmp_path / f"my_{kind}", f"kvframe-my-{kind}", "0.1.0", f"my_{kind} = kvframe_my_{kind}")
    path = [site, *(tmp_path / f"my_{kind}" for kind in KINDS)]
    call(sys.executable, "-m", "kvframe", "list", "out=list.json", "strict=true", cwd=tmp_path, path=path)
    found = json.loads((tmp_path / "list.json").read_text())
    assert found["plugins"][0]["location"].startswith(str(site))
    rows = {row["name"]: row for row in found["rows"] if row["name"].startswith("my_")}
    assert set(rows) == {f"my_{kind}" for kind in KINDS} and not any(row["error"] for row in rows.values())
    assert {row["distribution"] for row in rows.values()} == {f"kvframe-my-{kind}" for kind in KINDS}


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_installed_by_pip_decodes_and_passes_its_own_tests(kind, site, tmp_path):
    """As people do it, in an environment of its own."""
    here = functools.partial(call, cwd=tmp_path, path=[site])
    here(sys.executable, "-m", "venv", "--without-pip", "env")
    python = tmp_path / "env/bin/python"
    (packages,) = (tmp_path / "env").glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_paths()["purelib"])  # torch and the others; not kvframe as it is
    here(python, "-m", "kvframe", "new", "my_part", "--kind", kind)
    here(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "-e", "my_part")
    assert "kvframe-my-part" in here(python, "-m", "kvframe", "list", "--plugins")
    said = words("my_part", kind)
    tiny = ["model=random", "engine.max_len=64", "sampling.max_new_tokens=4", "prompt=hi"]
    here(python, "-m", "kvframe", "generate", *said["use"].split(), *said["small"].split(), *tiny)
    here(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=tmp_path / "my_part")
