"""What kvframe promises of a cache, held by its contract suite; and a model that decodes with this one."""

from kvframe_dictionary.cache import Dictionary

from kvframe import Request, SamplingParams, compose
from kvframe.config import build_engine
from kvframe.testing import KVCacheContract, check_greedy, tiny_model, wrap

OVERRIDES = "cache=dictionary kernel=reference".split()


class TestDictionary(KVCacheContract):
    def make(self, context):
        return Dictionary(context, tokens=144)


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
