"""Several caches for one model: what `caches=` names, and how each is built after the other has gone.

An entry of a lineup is the name of a preset, a quoted text of overrides, or a name and overrides behind it:

    caches=[NAME,'cache=NAME cache/codec=CODEC','NAME engine.max_step_tokens=64 kernel=KERNEL']

It is composed on top of the command's own overrides, of which it replaces those that set the same key: under
`cache=A cache.memory=2GiB` the entry `B` is `cache=B cache.memory=2GiB`. The model is the command's, and there is one.
A command may let entries name options of another group as well (`also`), which its config then holds.
"""

from __future__ import annotations

import gc
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict

from kvframe.config import build_engine, explained, folders, groups, hydra_config
from kvframe.create import nearest, resembling
from kvframe.errors import ConfigError, KVFrameError
from kvframe.overrides import quote
from kvframe.plugins import plugins

if TYPE_CHECKING:
    from kvframe.engine import Engine

KEY = "caches"
PRESETS = "cache"  # the group of the presets
ROOMS = ("cache", "engine", "kernel")  # what an entry may set
_OF_THE_MODEL = ("engine.pack_weights", "engine.replay", "engine.compile")  # which all share
_OVERRIDE = re.compile(r"~(?P<deleted>[^=]+)(?:=.*)?|\+{0,2}(?P<key>[A-Za-z_][\w./]*(?:@[^=]*)?)=.*", re.DOTALL)
_EXAMPLE = f"{KEY}=[NAME,'{PRESETS}=NAME {PRESETS}/codec=CODEC']"


@dataclass(frozen=True)
class Candidate:
    """One cache of a lineup. `name`: the entry as it was written; `cfg`: the whole config of the command under it."""

    name: str
    cfg: DictConfig


def lineup(
    entries: Any, overrides: Iterable[str] | None = None, command: str = "evaluate", also: Sequence[str] = ()
) -> list[Candidate]:
    """The candidates that a value of `caches` means, in its order.

    Args:
        entries: a list of entries, or a single one; None or "": every preset on the search path.
        overrides: the command's own, as a user writes them; None: those of the running job (see `own_overrides`).
        command: the primary config that is composed.
        also: groups beside the presets' whose options an entry may name and set.

    Raises:
        ConfigError: an empty list, an entry that is no text, is there twice, names no preset or sets what it may not
            or what does not exist, or a name that is in two of the groups. The message names the entry.
    """
    own = own_overrides() if overrides is None else [o for o in quote(overrides) if _key(o) != KEY]
    named = [(entry, _overrides(entry, also)) for entry in _entries(entries)]
    return [Candidate(name, _compose(own, asked, command, name)) for name, asked in named]


def preset(command: str, overrides: Iterable[str] | None = None) -> Candidate:
    """The candidate that a command has when nobody chooses a cache: its default preset, with no more than the
    memory and the engine of the command's own overrides."""
    own = own_overrides() if overrides is None else quote(overrides)
    kept = [o for o in own if not _within(_key(o), PRESETS) or _key(o) in ("cache.memory", "cache.num_blocks")]
    kept = [o for o in kept if _key(o) != KEY]
    cfg = _composed(kept, command)
    return Candidate(cfg.hydra.runtime.choices[PRESETS], _without_hydra(cfg))


def own_overrides() -> list[str]:
    """What the user of the running job has typed, quoted as Hydra got it, less `caches`; [] where no job runs. Under
    `-m` it is what this job has of it."""
    if not HydraConfig.initialized():
        return []
    task = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)  # \\${ in a text stays what it is
    return [override for override in task if _key(override) != KEY]


@contextmanager
def running(candidate: Candidate, model: Any, *, warm: bool = True) -> Iterator[Engine]:
    """The engine of a candidate around a model that exists already. Its cache is gone, memory and all, when the block
    ends, whoever still holds the engine: the next one can be built. KVFrameErrors name the candidate.

    Args:
        warm: run the steps that nobody sees (see Engine.warm) before the block begins.
    """
    try:
        engine = build_engine(candidate.cfg, model)
    except KVFrameError as error:
        raise error_of(candidate.name, error) from error
    try:
        if warm:
            engine.warm()
        yield engine
    finally:
        model.bind(None)
        model.running.plan = None
        for gone in (engine.cache, engine):  # a cache and its index hold each other; whoever looks at them holds both
            vars(gone).clear()
        del gone, engine
        if str(model.device).startswith("cuda"):
            import torch

            gc.collect()  # of what a plugin's cache ties together
            torch.cuda.empty_cache()


# -- entries -------------------------------------------------------------------------------------------------


def _entries(entries: Any) -> list[str]:
    if OmegaConf.is_config(entries):
        entries = OmegaConf.to_container(entries, resolve=True)
    if entries is None or entries == "":
        return groups()[PRESETS]
    entries = [entries] if isinstance(entries, str) else entries
    if not isinstance(entries, list | tuple):
        raise ConfigError(f"{KEY}={entries!r} is not a list", options=groups()[PRESETS], fix=_EXAMPLE)
    if not entries:
        raise ConfigError(
            f"{KEY}=[] names no cache", options=groups()[PRESETS], fix=f"{_EXAMPLE}, or {KEY}=null for every preset"
        )
    found: list[str] = []
    for entry in entries:
        if not isinstance(entry, str) or not entry.strip():
            raise ConfigError(
                f"{KEY}: {entry!r} is neither a preset nor a text of overrides",
                options=groups()[PRESETS],
                fix=_EXAMPLE,
            )
        if entry.strip() in found:
            raise ConfigError(f"{KEY} names {entry.strip()!r} twice", fix="leave one of them out")
        found.append(entry.strip())
    return found


def _overrides(entry: str, also: Sequence[str] = ()) -> list[str]:
    """The overrides that an entry stands for."""
    try:
        words = shlex.split(entry)
    except ValueError as error:
        raise ConfigError(f"{KEY}: {entry!r} cannot be read: {error}", fix="close the quotes") from error
    if words and "=" not in words[0] and not words[0].startswith("~"):
        words[0] = f"{_group_of(words[0], entry, also)}={words[0]}"
    for word in words:
        if _OVERRIDE.fullmatch(word) is None:
            raise ConfigError(f"{KEY}: {entry!r} has {word!r}, which is not KEY=VALUE", fix=_EXAMPLE)
        key, value = _key(word), word.partition("=")[2]
        group = key.partition("@")[0]
        if "/" in group and group not in groups() and (close := resembling(group, groups())):
            raise ConfigError(f"{KEY}: {entry!r}: the config group {group!r} does not exist", fix=f"{close[0]}={value}")
        if not any(_within(key, room) for room in (*ROOMS, *also)) or key in _OF_THE_MODEL:
            raise ConfigError(
                f"{KEY}: {entry!r} sets {_key(word)}, which all caches have in common",
                options=[f"{room}..." for room in (*ROOMS, *also)],
                fix=f"give {word} beside {KEY}, or run the command once for each value (-m)",
            )
    keys = [_key(word) for word in words]
    for group in also:  # something else than a cache, which has no parts
        unused = [word for word, key in zip(words, keys) if any(_within(key, room) for room in ROOMS)]
        if group in keys and unused:
            raise ConfigError(
                f"{KEY}: {entry!r}: {unused[0]} changes nothing of a {group}", fix=f"leave {unused[0]} out"
            )
    return words


def _group_of(name: str, entry: str, also: Sequence[str]) -> str:
    """The group that has an option of this name: the presets, or one of the others."""
    options = {group: groups().get(group, []) for group in (PRESETS, *also)}
    found = [group for group, names in options.items() if name in names]
    if not found:
        valid = nearest(name, dict.fromkeys(option for names in options.values() for option in names))
        asked = f"{KEY}: {entry!r} names the preset {name!r}, which does not exist"
        raise ConfigError(asked, options=valid, fix=f"{KEY}=[{valid[0]}], or {_EXAMPLE}")
    if len(found) > 1:
        meant = [f"'{group}={name}'" for group in found]
        raise ConfigError(f"{KEY}: {entry!r} is an option of {' and of '.join(found)}", options=meant, fix=meant[0])
    return found[0]


def _key(override: str) -> str:
    match = _OVERRIDE.fullmatch(override)
    return "" if match is None else (match["deleted"] or match["key"]).strip()


def _within(key: str, room: str) -> bool:
    return key == room or key.startswith((f"{room}.", f"{room}/"))


# -- configs -------------------------------------------------------------------------------------------------


def _compose(own: list[str], asked: list[str], command: str, entry: str) -> DictConfig:
    """The config of an entry: the command's own overrides, less those that the entry replaces, and the entry's."""
    replaced = {_key(override) for override in asked}
    kept = [override for override in own if _key(override) not in replaced]
    changed = [override for override in kept if _key(override).startswith(f"{PRESETS}/")]
    if PRESETS in replaced and changed:
        raise ConfigError(
            f"{KEY}: {entry!r} names a preset, and the command's own {' '.join(changed)} would change it",
            fix=f"leave that out, or write it into each entry that it is meant for: '{entry} {' '.join(changed)}'",
        )
    try:
        return _without_hydra(_composed([*kept, *asked], command))
    except KVFrameError as error:
        hint = f"under the command's own {' '.join(kept)}" if any(_within(_key(o), PRESETS) for o in kept) else ""
        raise error_of(entry, error, hint) from error


def _composed(overrides: list[str], command: str) -> DictConfig:
    """As the running job would, which may have been given more places for configs (`--config-dir`)."""
    known = {folder.url for folder in plugins().configs()}
    more = [folder.url for folder in folders() if folder.url not in known]
    search = [f"hydra.searchpath=[{','.join(repr(url) for url in more)}]"] if more else []
    try:
        return hydra_config([*overrides, *search], command)
    except KVFrameError:
        raise
    except Exception as error:
        raise explained(error, overrides, command) from error


def _without_hydra(cfg: DictConfig) -> DictConfig:
    with open_dict(cfg):
        del cfg["hydra"]
    return cfg


def error_of(entry: str, error: KVFrameError, hint: str = "") -> KVFrameError:
    """The same error, with the entry that it came from at its head."""
    made = type(error).__new__(type(error))
    made.__dict__.update(error.__dict__)
    head = f"{KEY}: {entry!r}" + (f" ({hint})" if hint else "")
    made.args = (f"{head}: {error}",)
    if hasattr(error, "message"):
        made.message = f"{head}: {error.message}"
    return made
