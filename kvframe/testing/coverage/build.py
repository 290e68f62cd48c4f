"""Which architectures there are, and a tiny random model of each."""

from __future__ import annotations

import contextlib
from unittest import mock

import torch
from torch import nn

from kvframe.testing.coverage.shrink import tiny_config
from kvframe.testing.models import spread


def architectures() -> dict[str, list[str]]:
    """Every distinct class of transformers' causal LMs -> the model types that lead to it. Imports none of them."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as names

    found: dict[str, list[str]] = {}
    for model_type, classes in names.items():
        for name in classes if isinstance(classes, list | tuple) else [classes]:
            found.setdefault(name, []).append(model_type)
    return found


def configs(name: str) -> list[type]:
    """The config classes of a model class.

    A config that holds others (text, vision) is replaced by the one among them that the class is made for, as
    `AutoModelForCausalLM.from_config` does.
    """
    from transformers import CONFIG_MAPPING

    own, found = model_class(name).config_class, []
    for model_type in architectures()[name]:
        config = CONFIG_MAPPING[model_type]
        parts = [part for part in (getattr(config, "sub_configs", None) or {}).values() if isinstance(part, type)]
        found.append(own if own is not config and own in parts else config)
    return list(dict.fromkeys(found))


def model_class(name: str) -> type:
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    found = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[architectures()[name][0]]]
    return next(each for each in (found if isinstance(found, list | tuple) else [found]) if each.__name__ == name)


def build(name: str, config_class: type, seed: int = 0, **options) -> nn.Module:
    """A tiny model in fp32 with seeded weights, in eval mode. `options` replace values of the config.

    Raises whatever transformers raises.
    """
    config = tiny_config(config_class, **options)
    config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]), _without_missing_towers():
        torch.manual_seed(seed)
        module = model_class(name)(config)
    spread(module.float(), seed)
    return module.eval()


@contextlib.contextmanager
def _without_missing_towers():
    """Inside, a part of a model (an image tower) that needs a package which is not installed is left out: text does not
    run through it."""
    from transformers import AutoModel

    real = AutoModel.from_config

    def from_config(*args, **kwargs):
        try:
            return real(*args, **kwargs)
        except ImportError:
            return nn.Identity()

    with mock.patch.object(AutoModel, "from_config", from_config):
        yield
