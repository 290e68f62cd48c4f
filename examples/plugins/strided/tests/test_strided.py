"""What kvframe promises of a retention, held by its contract suite; and a model that decodes with this one."""

from kvframe_strided.retention import Strided

from kvframe import Request, SamplingParams, compose
from kvframe.config import build_engine
from kvframe.testing import RetentionContract, check_greedy, tiny_model, wrap

OVERRIDES = "cache/retention=strided cache.retention.window=64 kernel=reference cache.num_blocks=32".split()


class TestStrided(RetentionContract):
    def make(self):
        return Strided(window=12)


def test_a_model_decodes_with_it():
    model, prompts = wrap(tiny_model("llama")), ([5, 9, 200, 31] * 8, [5, 9, 200, 31] * 8 + [17, 4])
    engine = build_engine(compose([*OVERRIDES, "engine.max_len=128", "engine.clock=virtual"]), model)
    sampling = SamplingParams(max_new_tokens=8, ignore_eos=True)
    outputs = engine.generate(Request(prompt_tokens=prompt, sampling=sampling) for prompt in prompts)
    engine.cache.check()
    assert [len(output.output_tokens) for output in outputs] == [8, 8]
    for prompt, output in zip(prompts, outputs):
        if engine.cache.exact:  # then the tokens are those of the model without any cache
            assert check_greedy(model.module, prompt, output.output_tokens) > 0
