"""Which architectures there are, and a tiny random model of each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch
from torch import nn

from kvframe.testing.coverage.shrink import tiny_config
from kvframe.testing.models import spread


def architectures() -> dict[str, list[type]]:
    """Every distinct class of transformers' causal LMs -> the config classes that lead to it.

    A config that holds others (text, vision) is replaced by the one among them that the class is made for, as
    `AutoModelForCausalLM.from_config` does.
    """
    found: dict[str, list[type]] = {}
    for config_class, model_class in _pairs():
        own = model_class.config_class
        if own is not None and own is not config_class and own in _parts(config_class):
            config_class = own
        configs = found.setdefault(model_class.__name__, [])
        if config_class not in configs:
            configs.append(config_class)
    return found


def build(name: str, config_class: type, seed: int = 0, **options) -> nn.Module:
    """A tiny model in fp32 with seeded weights, in eval mode. `options` replace values of the config.

    Raises whatever transformers raises.
    """
    model_class = next(model for _, model in _pairs() if model.__name__ == name)
    config = tiny_config(config_class, **options)
    config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]), _without_missing_towers():
        torch.manual_seed(seed)
        module = model_class(config)
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


def _pairs() -> Iterator[tuple[type, type]]:
    """(config class, model class); classes that need a package which is not installed are not in it."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING as mapping

    for config_class in mapping.keys():
        models = mapping[config_class]
        for model_class in models if isinstance(models, list | tuple) else [models]:
            yield config_class, model_class


def _parts(config_class: type) -> set[type]:
    """Classes of the configs within a config."""
    return {part for part in (getattr(config_class, "sub_configs", None) or {}).values() if isinstance(part, type)}
