"""The command line as people use it: in this process where that is enough, in one of its own where it is not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvframe.cli import main
from kvframe.commands import COMMANDS
from kvframe.commands.prompts import read_requests
from kvframe.errors import ConfigError
from kvframe.report import human_bytes, human_seconds, write_csv, write_json, write_text

TINY = ["model=random", "model.shape=tiny", "cache.memory=64MiB", "engine.max_len=256", "kernel=reference"]
GENERATE = ["generate", *TINY, "sampling.max_new_tokens=4"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def python(code: str, **kwargs) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, **kwargs)


def left_over(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


# -- help, version, names ------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_groups_keys_and_examples(command, capsys):
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"kvframe {command} " in text and "--cfg job" in text and "out=null" in text
    if command == "generate":
        for expected in (
            "cache/layout     contiguous, paged*",
            "cache.layout.block_size=null",
            "slots per block",
            "engine.seed=0",
        ):
            assert expected in text


def test_help_follows_the_choices(capsys, install):
    install("mine", files={"cache/layout/mine.yaml": "# Mine.\n_target_: x.y\ncolour: blue  # of the blocks\n"})
    main(["generate", "cache/layout=mine", "--help"])
    text = capsys.readouterr().out
    assert (
        "mine*" in text
        and "cache.layout.colour=blue" in text
        and "of the blocks" in text
        and "block_size=null" not in text
    )


@pytest.mark.parametrize("arguments", ([], ["--help"], ["-h"]))
def test_the_overview_names_the_commands(arguments, capsys):
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in COMMANDS)


def test_version(capsys):
    assert main(["--version"]) == 0 and capsys.readouterr().out.startswith("kvframe 0.")


@pytest.mark.parametrize(
    "arguments", (["generate", "--help"], ["list", "--plugins"], ["list"], ["generate", "--cfg", "job"])
)
def test_these_do_not_import_torch(arguments):
    code = f"import sys; from kvframe.cli import main; main({arguments}); assert 'torch' not in sys.modules, 'torch'"
    done = python(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("arguments", (["generate", "--help"], ["list", "--plugins"]))
@pytest.mark.skipif(find_spec("hydra_plugins") is not None, reason="Hydra imports whatever launchers are installed")
def test_these_are_there_within_a_second(arguments):
    def seconds() -> float:
        before = os.times()
        subprocess.run([sys.executable, "-m", "kvframe", *arguments], check=True, capture_output=True)
        after = os.times()  # processor time of the child: the machine may be busy with other tests
        return after.children_user + after.children_system - before.children_user - before.children_system

    assert min(seconds() for _ in range(3)) < 1


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["genrate"], r"no command 'genrate'"),
        (["generate", "Once upon a time"], "'Once upon a time' is not KEY=VALUE\n  fix: prompt='Once upon a time'"),
        (["generate", "cache=pagged", "prompt=x"], "cache=pagged does not exist\n  valid: paged, "),
        (["generate", "-m", "cache=paged,pagged", "prompt=x"], "cache=pagged does not exist"),
        (["generate", "cache.layout.blocksize=3", "prompt=x"], "cache.layout has no key 'blocksize'"),
        (["generate", "cache.memory='x", "prompt=x"], "cannot be read"),
        (["generate", *TINY, "prompt=a", "prompts=b.txt"], "prompt= and prompts= are both given"),
        (["generate", *TINY, "prompts=nowhere.jsonl"], "nowhere.jsonl cannot be read"),
        (["generate", *TINY, "+cache.layout.colour=1", "prompt=x"], "cache.layout has no parameter 'colour'"),
        (["generate", *TINY, "sampling.temperature=-1", "prompt=x"], "sampling.temperature=-1"),
        (["generate", *TINY, "sampling.top_p=[1]", "prompt=x"], "sampling.top_p=[1] cannot be used"),
        (["generate", *TINY, "prompt=x", "out=."], "out=. is a folder"),
        (["list", "-m", "plugins=true,false", "out=/tmp/x.json"], "fix: out=x.json hydra.sweep.dir=/tmp"),
    ],
)
def test_mistakes_are_told_without_a_traceback(arguments, message, capsys, here):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    assert left_over(here) == []


def test_debug_shows_the_traceback(monkeypatch):
    monkeypatch.setenv("KVFRAME_DEBUG", "1")
    with pytest.raises(ConfigError):
        main(["generate", "cache=pagged"])


# -- Hydra ---------------------------------------------------------------------------------------------------


def test_cfg_shows_the_config_and_flags_may_stand_anywhere(capsys, here):
    main(["generate", "cache=contiguous", "--cfg", "job", "prompt=a, ${b}", "--resolve"])
    text = capsys.readouterr().out
    assert "prompt: a, ${b}" in text and "contiguous.Contiguous" in text
    main(["list", "--info", "searchpath", "plugins=true"])
    assert "pkg://kvframe.conf" in capsys.readouterr().out
    assert left_over(here) == []


def test_a_sweep_writes_into_the_folder_of_each_job_and_an_index(here, capsys):
    assert (
        main(["list", "-m", "plugins=true", "hydra.verbose=false,true", "out=sub/list.json"]) != 0
    )  # hydra is not swept
    assert main(["list", "-m", "plugins=true,false", "out=sub/list.json", "hydra.sweep.dir=here"]) == 0
    assert [p for p in left_over(here) if p.endswith(".json")] == [
        "here/0/sub/list.json",
        "here/1/sub/list.json",
        "here/sweep.json",
    ]
    jobs = json.loads(Path("here/sweep.json").read_text())["jobs"]
    assert [(j["num"], j["out"], j["status"], j["error"]) for j in jobs] == [
        (0, "0/sub/list.json", "completed", None),
        (1, "1/sub/list.json", "completed", None),
    ]
    assert jobs[1]["overrides"][0].lower() == "plugins=false"
    assert "here/sweep.json" in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.parametrize("package, launcher", [("submitit", "submitit_local"), ("ray", "ray")])
def test_a_launcher_runs_the_jobs_in_other_processes(here, capsys, package, launcher):
    pytest.importorskip(package)
    jobs = ["list", "-m", "model=random", "model.shape=tiny,qwen2_5_0_5b,nosuch", f"hydra/launcher={launcher}"]
    assert main([*jobs, "out=x.json", "hydra.sweep.dir=sweep"]) == 1
    told = json.loads((here / "sweep" / "sweep.json").read_text())["jobs"]
    assert [(job["num"], job["status"]) for job in told] == [(0, "completed"), (1, "completed"), (2, "failed")]
    assert all((here / "sweep" / job["out"]).exists() for job in told[:2]) and told[2]["out"] is None
    assert not list((here / "sweep").glob("kvframe-*"))  # where the jobs left what they did
    printed = capsys.readouterr()
    assert printed.out.count("random-tiny") == 1 and "there is no config" not in printed.out
    assert "[job 2] failed: model.shape" in printed.err
    assert main([*jobs, "hydra.sweep.dir=elsewhere/deep"]) == 1
    assert not (here / "elsewhere").exists()  # nobody asked for a file


def test_a_sweep_lies_in_multirun_unless_told_otherwise(here):
    assert main(["list", "-m", "plugins=true,false", "out=x.json"]) == 0
    (index,) = here.glob("multirun/*/*/sweep.json")
    assert sorted(p.name for p in index.parent.iterdir()) == ["0", "1", "sweep.json"]


def test_a_sweep_without_out_leaves_nothing(here):
    assert main(["list", "-m", "plugins=true,false"]) == 0
    assert left_over(here) == []


def test_a_job_that_fails_is_recorded_and_the_others_go_on(here, capsys):
    overrides = ["model=random", "model.shape=tiny,tinny", "out=x.json", "hydra.sweep.dir=here"]
    assert main(["list", "-m", *overrides]) == 1
    one, two = json.loads(Path("here/sweep.json").read_text())["jobs"]
    assert (one["status"], one["out"]) == ("completed", "0/x.json") and Path("here/0/x.json").exists()
    assert (two["status"], two["out"]) == ("failed", None) and "tinny" in two["error"]
    error = capsys.readouterr().err
    assert "[job 1] failed: " in error and "Traceback" not in error


# -- list ----------------------------------------------------------------------------------------------------


def test_list_names_every_preset_and_part_with_its_origin(capsys, here):
    assert main(["list", "out=list.json"]) == 0
    rows = {(r["group"], r["name"]): r for r in json.loads(Path("list.json").read_text())["rows"]}
    paged = rows["cache", "paged"]
    assert paged["kind"] == "preset" and paged["exact"] is True and paged["distribution"] == "kvframe"
    assert paged["parts"]["layout"] == "Paged" and paged["bytes_per_token"] is None
    assert rows["cache/layout", "contiguous"]["kind"] == "layout" and rows["kernel", "auto"]["exact"] is None
    missing = {r["name"] for r in rows.values() if r["error"] and "is not installed" in r["error"]}
    assert missing <= {"nf4", "bnb8"}, "only these need a package that is optional"
    assert all(r["description"] and (r["error"] is None or r["name"] in missing) for r in rows.values())
    assert not any(group.split("/")[0] == "base" for group, _ in rows)
    assert "cache/layout=contiguous" in capsys.readouterr().out


def test_list_counts_bytes_from_the_planes_of_the_codec(here):
    assert main(["list", "model=random", "model.shape=tiny", "out=list.json"]) == 0
    found = json.loads(Path("list.json").read_text())
    from kvframe.hf import random_model

    layers = random_model("tiny").layers
    expected = sum((la.k_dim + la.v_dim) * la.kv_heads * 4 for la in layers)
    row = next(r for r in found["rows"] if r["group"] == "cache" and r["name"] == "paged")
    assert row["bytes_per_token"] == expected and found["model"]["layers"] == len(layers)


def test_list_plugins_tells_the_broken_ones(install, capsys):
    install("broken", "raise RuntimeError('no luck')")
    assert main(["list", "--plugins", "out=list.json"]) == 0
    one, two = json.loads(Path("list.json").read_text())["plugins"]
    assert (one["name"], one["module"], one["error"]) == ("builtin", "kvframe_plugins", None)
    assert (two["name"], two["distribution"], two["error"]) == ("broken", "kv-broken", "RuntimeError: no luck")
    assert "kv-broken" in capsys.readouterr().out


def test_a_part_that_cannot_be_built_is_an_error_in_its_row(install, here, capsys):
    install("odd", files={"cache/codec/odd.yaml": "# Odd.\n_target_: nowhere.Codec\n"})
    assert main(["list", "out=list.json"]) == 0
    row = next(r for r in json.loads(Path("list.json").read_text())["rows"] if r["name"] == "odd")
    assert "nowhere" in row["error"] and row["plugin"] == "odd" and row["distribution"] == "kv-odd"


# -- prompts -------------------------------------------------------------------------------------------------


def test_prompts_of_a_file_keep_their_order_ids_and_sampling(here):
    lines = [
        '"a text"',
        '{"prompt": "b", "id": "r0", "sampling": {"n": 2, "stop": "x"}}',
        "",
        '{"prompt_tokens": [1, 2], "salt": "s"}',
    ]
    Path("p.jsonl").write_text("\n".join([*lines, '{"messages": [{"role": "user", "content": "c"}], "arrival": 1.5}']))
    requests = read_requests(None, "p.jsonl", {"max_new_tokens": 7}, chat=True)
    assert [r.id for r in requests] == ["r1", "r0", "r2", "r3"]
    assert requests[0].messages == [{"role": "user", "content": "a text"}] and requests[2].prompt_tokens == [1, 2]
    assert (
        requests[1].sampling.n == 2 and requests[1].sampling.stop == ("x",) and requests[1].sampling.max_new_tokens == 7
    )
    Path("p.txt").write_text("one\r\n\n two \nthree", newline="")
    assert [r.prompt for r in read_requests(None, "p.txt", {}, chat=False)] == ["one", " two ", "three"]


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"prompt": "a"', "p.jsonl, line 2 is not JSON"),
        ('{"promt": "a"}', "p.jsonl, line 2: a request has no key 'promt'\n  valid: prompt"),
        ('{"id": "x"}', "p.jsonl, line 2: request 'x' gives no prompt"),
        ('{"prompt": "a", "prompt_tokens": [1]}', "p.jsonl, line 2: a request gives prompt and prompt_tokens"),
        ("17", "p.jsonl, line 2: a prompt is a text or an object"),
        ('{"prompt": 17}', "p.jsonl, line 2: prompt=17 cannot be used"),
        ('{"prompt": "a", "sampling": {"temprature": 1}}', "sampling has no key 'temprature'\n  valid: temperature"),
        ('{"prompt": "a", "sampling": {"top_p": 7}}', "p.jsonl, line 2: sampling.top_p=7"),
        ('{"prompt": "a", "sampling": {"top_p": "x"}}', "p.jsonl, line 2: sampling.top_p='x' cannot be used"),
        ('{"prompt": "a", "id": "first"}', "line 2: the id 'first' is also on line 1"),
    ],
)
def test_a_bad_line_is_named(here, line, message):
    Path("p.jsonl").write_text('{"prompt": "fine", "id": "first"}\n' + line + "\n")
    with pytest.raises(ConfigError) as error:
        read_requests(None, "p.jsonl", {}, chat=False)
    assert message in str(error.value)


def test_files_that_cannot_be_read_are_named(here):
    Path("empty.txt").write_text("\n \n")
    Path("latin.txt").write_bytes("café".encode("latin-1"))
    for name, message in (
        ("p.csv", ".jsonl, .txt"),
        ("empty.txt", "holds no prompts"),
        ("latin.txt", "not UTF-8"),
        ("no.txt", "No such file"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_requests(None, name, {}, chat=False)


# -- generate ------------------------------------------------------------------------------------------------


def test_generate_writes_everything(here, capsys):
    prompt = "Hello, what's new? f(x) = {x}, ${y}\n42"
    assert main([*GENERATE, f"prompt={prompt}", "out=new/run.json"]) == 0
    run = json.loads(Path("new/run.json").read_text())
    (request,) = run["requests"]
    assert request["prompt"] == prompt and len(request["output_tokens"]) <= 4
    assert {"prompt_tokens", "output_tokens", "text", "finish_reason", "ttft_s", "itl_s"} <= set(request)
    summary = {
        "output_tokens_per_s",
        "kv_bytes_reserved",
        "kv_bytes_used",
        "kv_bytes_peak",
        "utilization",
        "preemptions",
    }
    assert summary | {"cached_tokens"} <= set(run["summary"]) and run["summary"]["kernels"].keys() == {"reference"}
    assert run["config"]["prompt"] == prompt and run["config"]["cache"]["layout"]["block_size"] is None
    assert {"kvframe", "torch", "transformers", "numpy", "python", "platform"} <= set(run["versions"])
    out, err = capsys.readouterr()
    assert out == request["text"] + "\n" and "output tokens/s" in err and "kernel" in err
    assert left_over(here) == ["new", "new/run.json"]


def test_generate_sweeps_over_caches(here):
    assert main([*GENERATE, "-m", "cache=contiguous,paged", "prompt=a, b", "out=run.json", "hydra.sweep.dir=s"]) == 0
    one, two = (json.loads(Path(f"s/{i}/run.json").read_text()) for i in (0, 1))
    assert one["requests"][0]["output_tokens"] == two["requests"][0]["output_tokens"]
    assert one["config"]["cache"] != two["config"]["cache"] and one["config"]["prompt"] == "a, b"


def test_generate_sweeps_over_a_parameter_of_a_part(here):
    assert (
        main([*GENERATE, "-m", "cache=paged", "cache.layout.block_size=1,16", "prompt=f(x) = {x}", "out=run.json"]) == 0
    )
    assert len(list(here.glob("multirun/*/*/*/run.json"))) == 2


def test_many_prompts_come_in_their_order(here, capsys):
    Path("p.jsonl").write_text('{"id": "z", "prompt": "a"}\n{"id": "y", "prompt": "b", "sampling": {"n": 2}}\n"c"\n')
    assert main([*GENERATE, "prompts=p.jsonl", "out=run.json"]) == 0
    run = json.loads(Path("run.json").read_text())
    assert [(r["id"], r["sample"]) for r in run["requests"]] == [("z", 0), ("y", 0), ("y", 1), ("r0", 0)]
    assert capsys.readouterr().out.count("--- ") == 4


def test_a_refused_request_is_named_and_the_others_are_written(here, capsys):
    long = " ".join(str(i) for i in range(400))
    Path("p.jsonl").write_text(json.dumps({"id": "long", "prompt": long}) + '\n"short"\n')
    assert main([*GENERATE, "prompts=p.jsonl", "out=run.json"]) == 1
    reasons = {r["id"]: r["finish_reason"] for r in json.loads(Path("run.json").read_text())["requests"]}
    assert reasons["long"] == "refused" and reasons["r0"] in ("length", "stop")
    assert "refused: request 'long'" in capsys.readouterr().err
    assert main([*GENERATE, f"prompt={long}", "out=alone.json"]) == 2
    assert "256" in capsys.readouterr().err and not Path("alone.json").exists()


def test_text_on_stdin_is_a_prompt():
    done = subprocess.run(
        [sys.executable, "-m", "kvframe", *GENERATE, "out=run.json"], input="one\ntwo\n", capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(Path("run.json").read_text())["requests"][0]["prompt"] == "one\ntwo"


def test_nothing_to_decode_is_told():
    arguments = [sys.executable, "-m", "kvframe", *GENERATE]
    done = subprocess.run(arguments, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 2 and "nothing to decode" in done.stderr


def test_ctrl_c_leaves_nothing_behind(here):
    arguments = [sys.executable, "-m", "kvframe", *GENERATE, "sampling.max_new_tokens=200", "sampling.ignore_eos=true"]
    Path("p.jsonl").write_text('"a"\n' * 400)
    process = subprocess.Popen(
        [*arguments, "prompts=p.jsonl", "out=run.json"], stderr=subprocess.PIPE, stdout=subprocess.PIPE
    )
    time.sleep(8)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err.decode()
    assert b"interrupted" in err and b"Traceback" not in err
    assert left_over(here) == ["p.jsonl"]


def test_a_closed_pipe_is_quiet():
    script = f"{sys.executable} -m kvframe list --plugins | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert done.stderr == "" and done.returncode in (0, 1, 141)


# -- files ---------------------------------------------------------------------------------------------------


def test_json_is_strict_and_short(here):
    value = {"tokens": [1, 2], "texts": ["[\n 1\n]"], "bad": [float("nan"), 1.5], "rows": [[1, -2.5e-9], []]}
    text = write_json("x.json", value).read_text()
    assert json.loads(text) == {**value, "bad": [None, 1.5]}
    assert '"tokens": [1, 2]' in text and "[1, -2.5e-09]" in text


def test_a_file_is_written_whole_or_not_at_all(here, monkeypatch):
    write_text("x.txt", "old")

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_text("x.txt", "new")
    assert Path("x.txt").read_text() == "old" and left_over(here) == ["x.txt"]


def test_csv_has_the_columns_of_all_rows(here):
    assert write_csv("x.csv", [{"a": 1, "b": "x,y"}, {"c": 2}]).read_text() == 'a,b,c\n1,"x,y",\n,,2\n'


def test_units():
    assert [human_bytes(n) for n in (0, 1023, 1536, 3 * 2**30)] == ["0 B", "1023 B", "1.50 KiB", "3.00 GiB"]
    assert [human_seconds(s) for s in (None, 0.0123, 2)] == ["-", "12.3 ms", "2.00 s"]
