"""Workloads: seeded, of the sizes that were asked for, and with nothing in common but what is meant to be."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kvframe.config import build_workload, compose, groups
from kvframe.errors import ConfigError
from kvframe.outputs import RequestOutput
from kvframe.text import TextCodec
from kvframe.workloads.drawing import Draws
from kvframe.workloads.endless import Endless
from kvframe.workloads.file import File
from kvframe.workloads.long_context import LongContext
from kvframe.workloads.mixed import Mixed
from kvframe.workloads.multi_turn import MultiTurn
from kvframe.workloads.shared_prefix import SharedPrefix
from kvframe.workloads.workload import Facts, measure, play

FACTS = Facts(512, TextCodec(vocab_size=512))


def answers(requests, token=7):
    return [
        RequestOutput(r.id, prompt_tokens=list(r.prompt_tokens), output_tokens=[token] * r.sampling.max_new_tokens)
        for r in requests
    ]


def first_round(workload):
    return next(iter(workload.rounds(FACTS)))


def test_every_option_builds_and_knows_its_size(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    for name in groups()["workload"]:
        more = [f"workload.path={tmp_path / 'a.txt'}"] if name == "file" else []
        workload = build_workload(compose([f"workload={name}", *more], "compare"))
        size = measure(workload, FACTS)
        assert size.requests >= 2 and size.longest > 3 and workload.what and size == measure(workload, FACTS)


def test_a_seed_gives_the_same_requests_and_another_one_others():
    one, two, other = Mixed(seed=3), Mixed(seed=3), Mixed(seed=4)
    assert measure(one, FACTS) == measure(two, FACTS)
    assert measure(one, FACTS).digest != measure(other, FACTS).digest
    for a, b in zip(first_round(one), first_round(two)):
        assert np.array_equal(a.prompt_tokens, b.prompt_tokens) and a.sampling == b.sampling


def test_sizes_are_within_their_bounds_and_prompts_share_nothing():
    requests = first_round(Mixed(requests=40, prompt=[3, 9], output=[2, 4]))
    assert {len(r.prompt_tokens) for r in requests} == set(range(3, 10))
    assert {r.sampling.max_new_tokens for r in requests} == {2, 3, 4}
    assert len({int(r.prompt_tokens[0]) for r in requests}) == 40
    assert all(r.sampling.ignore_eos and r.sampling.temperature == 0 for r in requests)
    assert min(r.prompt_tokens.min() for r in requests) >= 100 and max(r.prompt_tokens.max() for r in requests) < 512


def test_a_small_vocabulary_is_enough():
    draws = Draws(0, Facts(8, TextCodec(vocab_size=8)))
    assert all(2 <= t < 8 for _ in range(20) for t in draws.tokens(3))


def test_shared_prefixes_are_shared_and_nothing_else():
    requests = first_round(SharedPrefix(requests=5, prefixes=2, prefix=10, prompt=[2, 4], output=3))
    heads = [tuple(r.prompt_tokens[:10]) for r in requests]
    assert heads[0] == heads[2] == heads[4] and heads[1] == heads[3] and heads[0][0] != heads[1][0]
    assert len({int(r.prompt_tokens[10]) for r in requests}) == 5
    assert all(12 <= len(r.prompt_tokens) <= 14 and r.sampling.max_new_tokens == 3 for r in requests)


def test_a_turn_holds_all_that_was_said_before():
    workload, rounds = MultiTurn(chats=2, turns=3, system=6, user=[2, 5], output=4), []

    def answer(requests):
        rounds.append(requests)
        return answers(requests, token=len(rounds))

    outputs = play(workload, FACTS, answer)
    assert [len(round) for round in rounds] == [2, 2, 2] and len(outputs) == 6
    system = rounds[0][0].prompt_tokens[:6]
    for turn in (1, 2):
        for before, now in zip(rounds[turn - 1], rounds[turn]):
            said = [*before.prompt_tokens, *[turn] * 4]
            assert now.prompt_tokens[: len(said)].tolist() == said and 2 <= len(now.prompt_tokens) - len(said) <= 5
            assert np.array_equal(now.prompt_tokens[:6], system)
    size = measure(workload, FACTS)
    assert (size.rounds, size.requests, size.output_tokens) == (3, 6, 24)
    assert size.longest == max(len(r.prompt_tokens) for r in rounds[2]) + 4


def test_a_chat_without_an_answer_ends():
    workload, rounds = MultiTurn(chats=3, turns=2, system=0, user=2, output=2), []

    def answer(requests):
        rounds.append([request.id for request in requests])
        return answers(requests[1:])

    play(workload, FACTS, answer)
    assert rounds == [["chat0.0", "chat1.0", "chat2.0"], ["chat1.1", "chat2.1"]]


def test_long_ones_are_as_long_as_they_say():
    assert measure(LongContext(requests=3, prompt=100, output=5), FACTS).longest == 105
    size = measure(Endless(requests=2), FACTS)
    assert size.longest > 1024 and size.prompt_tokens < 2 * 1024  # the window is left while decoding


# -- files ---------------------------------------------------------------------------------------------------


def test_a_file_is_read_as_generate_reads_it(tmp_path):
    lines = [
        "hello",
        {"prompt": "abc", "id": "q", "sampling": {"max_new_tokens": 3}},
        {"prompt_tokens": [5, 6]},
    ]
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    requests = first_round(File(str(path), output=9))
    assert [list(r.prompt_tokens) for r in requests] == [list(b"hello"), list(b"abc"), [5, 6]]
    assert [r.sampling.max_new_tokens for r in requests] == [9, 3, 9] and requests[1].id == "q"
    assert len({r.id for r in requests}) == 3 and all(r.sampling.ignore_eos for r in requests)
    assert len(first_round(File(str(path), requests=2))) == 2
    before = measure(File(str(path)), FACTS).digest
    path.write_text(path.read_text().replace("hello", "hullo"))
    assert measure(File(str(path)), FACTS).digest != before, "other prompts are another workload"


WRONG_LINES = {
    "temperature": ({"prompt": "a", "id": "q", "sampling": {"temperature": 1.0}}, "'q' sets sampling.temperature=1.0"),
    "stop": ({"prompt": "a", "sampling": {"stop": ["x"]}}, "sets sampling.stop=.*valid: max_new_tokens"),
    "eos": ({"prompt": "a", "sampling": {"ignore_eos": False}}, "sets sampling.ignore_eos=False"),
    "arrival": ({"prompt": "a", "arrival": 2}, "arrival=2.0: all come at once"),
    "nothing": ({"prompt": "a", "sampling": {"max_new_tokens": 0}}, "max_new_tokens=0"),
    "key": ({"promt": "a"}, "line 1: a request has no key 'promt'"),
}


@pytest.mark.parametrize("case", WRONG_LINES)
def test_a_line_that_cannot_be_compared_is_named(case, tmp_path):
    line, message = WRONG_LINES[case]
    (tmp_path / "p.jsonl").write_text(json.dumps(line))
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        File(str(tmp_path / "p.jsonl"))


WRONG = {
    "workload.requests=0": "workload.requests=0 cannot be used", "workload.prompt=[9,3]": r"workload.prompt=\[9, 3\]",
    "workload.prompt=[1,2,3]": "workload.prompt=", "workload.output=0": "workload.output=0 cannot",
    "workload.seed=-1": "workload.seed=-1", "workload.size=3": "no key 'size'|no parameter 'size'",
    "workload=nothing": "workload=nothing does not exist", "workload=file": "workload.path must be given",
    "workload=null": "workload=null names no option",
}  # fmt: skip


@pytest.mark.parametrize("override", WRONG)
def test_a_wrong_option_is_named_with_what_is_valid(override):
    with pytest.raises(ConfigError, match=WRONG[override]):
        build_workload(compose([override], "compare"))


def test_a_path_is_a_text():
    cfg = compose(["workload=file", "workload.path=a, b=c.jsonl"], "compare")
    assert cfg.workload.path == "a, b=c.jsonl"


def test_somebody_elses_workload_is_a_class_and_a_file(install):
    code = """
        from kvframe.workloads.workload import Workload, ask
        class Twice(Workload):
            what = "one prompt, twice"
            def __init__(self, n=3): self.n = n
            def rounds(self, facts):
                (first,) = yield [ask("a", range(1, self.n + 1), 2)]
                yield [ask("b", [*first.prompt_tokens, *first.output_tokens], 1)]
        """
    install("twice", code, {"workload/twice.yaml": "# Twice.\n_target_: kv_twice_module.Twice\nn: 4\n"})
    size = measure(build_workload(compose(["workload=twice"], "compare")), FACTS)
    assert (size.rounds, size.requests, size.prompt_tokens, size.output_tokens, size.longest) == (2, 2, 10, 3, 7)
