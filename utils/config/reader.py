"""Read a configuration: its defaults, then a section of a YAML file, then the command line."""

import argparse
import contextlib
import difflib
import math
import re
import types
import typing
from dataclasses import Field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from utils.config.settings import FIELDS, Config
from utils.reading import read_text

YAML_CONFIG = "config/ViT.yaml"
WHOLE = re.compile(r"[-+]?\d[\d_]*")
LARGEST_YAML, MOST_VALUES = 2**24, 10**5  # bytes of a file; values of one, as often as aliases repeat them
LONG = 1000  # so many characters more count as one value more
# Keys of the tutorial's YAML files that nothing here needs: accepted, and said.
UNUSED_KEYS = ("wireup_info", "wireup_store")


def _unknown(name: str, known: typing.Iterable[str], what: str, where: str) -> ValueError:
    close = difflib.get_close_matches(name, list(known), n=1)
    remedy = f"did you mean {close[0]!r}?" if close else f"the known ones are {', '.join(sorted(known))}"
    return ValueError(f"unknown {what} {name!r} {where}: {remedy}")


def _parts(field: Field) -> tuple[type, bool, bool]:
    """Split the type of a field into (element type, is it a list, may it be None)."""
    kind, optional = field.type, False
    if isinstance(kind, types.UnionType):
        kind, optional = next(t for t in typing.get_args(kind) if t is not types.NoneType), True
    if typing.get_origin(kind) is list:
        return typing.get_args(kind)[0], True, optional
    return kind, False, optional


def _scalar(name: str, value: Any, kind: type) -> Any:
    """Cast one value to the type of its field: PyYAML reads `5E-4` and quoted numbers as strings."""
    try:
        if kind is bool:
            return {"true": True, "false": False}[str(value).lower()]
        if isinstance(value, (bool, dict, list)) or value is None:
            raise ValueError
        if kind is str:
            return str(value)
        if kind is int and WHOLE.fullmatch(str(value)):  # with more digits than a float has
            return int(value)
        number = float(value)
        if not math.isfinite(number) or (kind is int and not number.is_integer()):
            raise ValueError
        return kind(number)
    except (KeyError, TypeError, ValueError, OverflowError):  # TypeError: of a set, which YAML knows, too
        raise ValueError(
            f"{name} is {value!r}: it takes {'true or false' if kind is bool else kind.__name__}"
        ) from None


def cast(field: Field, value: Any) -> Any:
    """Return `value` as the type of the field.

    Raises ValueError with the rule where that cannot be, or where the value is not a legal one.
    """
    name, meta = field.name, field.metadata
    kind, is_list, optional = _parts(field)
    if meta["alone"] is not None:  # a switch that may also name what to switch on: `a, b` or a list
        value = [value] if not isinstance(value, (list, tuple)) else value
        words = [word for part in value for word in str(part).replace(",", " ").split()]
        switch = {"true": meta["alone"], "false": ()}.get(words[0].lower()) if len(words) == 1 else None
        value = words if switch is None else switch
    if meta["mapping"] and isinstance(value, dict):
        value = meta["mapping"](value)
    if value in (None, "None", ["None"]):
        if optional:
            return None
        raise ValueError(f"{name} is None: it takes {kind.__name__}")
    if is_list and not isinstance(value, (list, tuple)):
        value = [value]
    out = tuple(_scalar(name, v, kind) for v in value) if is_list else _scalar(name, value, kind)
    for item in out if is_list else (out,):
        if meta["choices"] and item not in meta["choices"]:
            raise ValueError(f"{name} is {item!r}: it takes one of {', '.join(meta['choices'])}")
        if meta["at_least"] is not None and item < meta["at_least"]:
            raise ValueError(f"{name} is {item}: it takes {meta['at_least']} or more")
        if meta["at_most"] is not None and item > meta["at_most"]:
            raise ValueError(f"{name} is {item}: it takes {meta['at_most']} or less")
        if meta["rule"]:
            meta["rule"](name, item)
    return out


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise ValueError(message)


def parse(argv: list[str], helps: list[tuple[Field, str]], description: str) -> tuple[dict[str, Any], list[str]]:
    """Return the flags given, of these fields with their texts, and a remark for each that was shortened.

    Raises ValueError for another flag, with the closest, and for a shortened one that may be several.
    """
    names = [f"--{field.name}" for field, _ in helps] + ["--yaml_config"]
    names += [f"--no_{field.name}" for field, _ in helps if _has_no(field)]
    argv, remarks = _lengthened(argv, [*names, *(f"--{name}" for name in UNUSED_KEYS), "--help"])
    switches = "A flag without a value, --x, is undone by --no_x; its default stands in brackets."
    parser = _Parser(allow_abbrev=False, argument_default=argparse.SUPPRESS, description=description, epilog=switches)
    parser.add_argument("--yaml_config", help=f"YAML file of named sections ({YAML_CONFIG})")
    for field, text in helps:
        name, (kind, is_list, _), choices = field.name, _parts(field), field.metadata["choices"]
        text = text.replace("%", "%%") if text != argparse.SUPPRESS else text
        if kind is bool:
            parser.add_argument(f"--{name}", action="store_const", const=True, help=text)
            parser.add_argument(f"--no_{name}", dest=name, action="store_const", const=False, help=argparse.SUPPRESS)
        else:
            metavar = "{" + ",".join(choices) + "}" if choices else kind.__name__.upper()
            count = "*" if _has_no(field) else "+" if is_list else None
            parser.add_argument(f"--{name}", nargs=count, metavar=metavar, help=text)
            if _has_no(field):
                parser.add_argument(f"--no_{name}", dest=name, action="store_const", const=(), help=argparse.SUPPRESS)
    for name in UNUSED_KEYS:
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    switches = {f"--{field.name}" for field, _ in helps if _parts(field)[0] is bool}
    switches |= {f"--no_{field.name}" for field, _ in helps if _has_no(field)}
    for flag, equals, value in (word.partition("=") for word in argv):
        if equals and flag in switches:
            raise _takes_none(flag, value)
    given, extra = parser.parse_known_args(argv)
    if extra:
        stray = extra[0]
        for before, word in pairwise(argv):
            if word == stray and before in switches and not stray.startswith("-"):
                raise _takes_none(before, stray)
        if not stray.startswith("-") or stray == "--":
            raise ValueError(f"{stray!r} on the command line belongs to no flag: write --FLAG VALUE, or leave it out")
        raise _unknown(stray.split("=")[0], names, "flag", "on the command line")
    alone = {field.name: field.metadata["alone"] for field, _ in helps if getattr(given, field.name, None) == []}
    return vars(given) | alone, remarks


def _takes_none(flag: str, value: str) -> ValueError:
    name = flag.removeprefix("--").removeprefix("no_")
    return ValueError(f"{flag} takes no value, and {value!r} follows it: write --{name}, or --no_{name}")


def _has_no(field: Field) -> bool:
    """Whether a flag can be switched off: `--no_NAME`."""
    return _parts(field)[0] is bool or field.metadata["alone"] is not None


def _lengthened(argv: list[str], names: list[str]) -> tuple[list[str], list[str]]:
    """Return a command line with its shortened flags in full, as argparse would read them, and a remark for each.

    Raises ValueError for a beginning that several flags share.
    """
    found, remarks = [], []
    for word in argv:
        flag, equals, value = word.partition("=")
        meant = [name for name in names if name.startswith(flag)] if flag.startswith("--") and flag != "--" else []
        if flag in meant or not meant:
            found.append(word)
        elif len(meant) > 1:
            raise ValueError(f"{flag} on the command line may be {', '.join(meant)}: write it in full")
        else:
            found.append(f"{meant[0]}{equals}{value}")
            remarks.append(f"{flag} is taken for {meant[0]}: write flags in full, others may come to begin so")
    return found, remarks


def default_yaml() -> str:
    """Return the path of the sections: of the folder that one is in, else of the clone that this code is in."""
    return YAML_CONFIG if Path(YAML_CONFIG).exists() else str(Path(__file__).parents[2] / YAML_CONFIG)


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice: YAML would take the last one, in silence."""

    def __init__(self, text: str):
        super().__init__(text)
        self.sizes: dict[int, int] = {}  # values of a node, by its id, as often as aliases repeat them

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node, lines = super().compose_mapping_node(anchor), {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.YAMLError(f"the key in line {line} is no word: write NAME: VALUE")
            name = key.value
            if name in lines:
                raise yaml.YAMLError(f"{name!r} stands in line {lines[name]} and again in line {line}: remove one")
            lines[name] = line
        return node

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        """Raise YAMLError where aliases unfold to more than any configuration has: few lines can make billions."""
        is_alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        if id(node) not in self.sizes:
            if is_alias:
                raise yaml.YAMLError("an alias stands in what it names: write it out")
            parts = [x for pair in node.value for x in pair] if isinstance(node, yaml.MappingNode) else node.value
            text = parts if isinstance(parts, str) else ""
            parts = parts if isinstance(parts, list) else []
            self.sizes[id(node)] = 1 + len(text) // LONG + sum(self.sizes.get(id(part), MOST_VALUES) for part in parts)
        if self.sizes[id(node)] > MOST_VALUES:
            raise yaml.YAMLError(f"it unfolds to more than {MOST_VALUES:,} values: write less, or without aliases")
        return node


def _as_written(loader: _Loader, node: yaml.ScalarNode) -> int | float | str:
    """Return a number only where Python would write it so: else its text, which each key reads as its kind.

    YAML 1.1 takes 00 for 0 and 010 for 8, and a run may be called so; it takes 10:00 for 600, and knows dates.
    """
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            if repr(kind(node.value)) == node.value:
                return kind(node.value)
    return node.value


for kind in ("int", "float", "timestamp"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{kind}", _as_written)


def _read_section(path: str, section: str) -> dict[str, Any]:
    try:
        text = read_text(Path(path), LARGEST_YAML)
    except OSError as error:
        raise ValueError(f"cannot read the configuration {path} ({error.strerror}): check --yaml_config") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from None
    try:
        sections = yaml.load(text, _Loader)  # safe: a SafeLoader
    except Exception as error:  # a value with a tag that it does not fit raises anything
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(sections, dict) or not all(
        isinstance(s, dict) and isinstance(n, str) for n, s in sections.items()
    ):
        raise ValueError(f"{path} must hold named sections of flat keys, such as 'base: {{embed_dim: 384}}'")
    if section not in sections:
        raise _unknown(section, sections, "section", f"in {path} (--config)")
    if odd := [key for key in sections[section] if not isinstance(key, str)]:
        raise ValueError(f"{path} has the key {odd[0]!r} in section {section!r}: keys are names")
    return sections[section]


def _merge(values: dict, layer: dict, where: str) -> None:
    """Lay `layer` over `values`."""
    for name in layer:
        if name not in FIELDS and name not in UNUSED_KEYS:
            raise _unknown(str(name), FIELDS, "key", where)
    layer = {name: cast(FIELDS[name], value) for name, value in layer.items() if name in FIELDS}
    # Of the two batch sizes, the one that was said last decides.
    for said, other in (("local_batch_size", "global_batch_size"), ("global_batch_size", "local_batch_size")):
        if layer.get(said) is not None:
            layer.setdefault(other, None)
    values.update(layer)


def _parse_chapter(argv: list[str], chapter: int) -> tuple[dict[str, Any], list[str]]:
    """Return what `parse` does, of the flags that the scripts up to this chapter's know; the help shows no others."""
    helps = [
        (field, f"{field.metadata['help']} ({field.default})")
        if field.metadata["chapter"] <= chapter
        else (field, argparse.SUPPRESS)
        for field in FIELDS.values()
    ]
    return parse(argv, helps, "Every key of the YAML file is a flag; the command line wins over the YAML section.")


def answer_help(argv: list[str]) -> None:
    """End the process with chapter 1's flags where --help asks for them. What else is wrong, `load_config` says."""
    if "--help" in argv or "-h" in argv:
        with contextlib.suppress(ValueError):
            _parse_chapter(argv, 1)


def _check_rollout(config: Config) -> list[str]:
    """Return a remark where forecasts never get as long as asked for. Raises ValueError for what is no curriculum."""
    first, steps = list(config.rollout_from), list(config.rollout_steps)
    if not first or len(first) != len(steps) or first != sorted(set(first)):
        raise ValueError(
            f"rollout_from is {first} for rollout_steps {steps}: it takes the iteration from which each of them "
            f"holds, one after the other"
        )
    reached = first[-1] < config.num_iters or max(steps) == 1
    return [] if reached else [f"rollout_from {first[-1]} is not reached: num_iters is {config.num_iters}"]


def keys_given(argv: list[str], chapter: int = 1) -> set[str]:
    """Return the keys that a command line sets."""
    return {*_parse_chapter(argv, chapter)[0]}


def load_config(argv: list[str], chapter: int = 1) -> tuple[Config, list[str]]:
    """Return the configuration that the command line `argv` asks for, and remarks for the log.

    Raises ValueError for an unknown section, key, flag or value, with the closest legal one, and for a key that only
    the scripts after this chapter's know.
    """
    flags, shortened = _parse_chapter(argv, chapter)
    path = flags.pop("yaml_config", None) or default_yaml()
    values: dict[str, Any] = {}
    section = flags.get("config", FIELDS["config"].default)
    keys = _read_section(path, section)
    _merge(values, keys, f"in section {section!r} of {path}")
    _merge(values, {**flags, "config": section}, "on the command line")
    config = Config(**values)
    for name, field in FIELDS.items():
        if field.metadata["chapter"] > chapter and getattr(config, name) != field.default:
            script = {2: "train_mp.py", 3: "train_mp_graphs.py"}[field.metadata["chapter"]]
            raise ValueError(f"{name} is {getattr(config, name)}, and this script does not know it: run {script}")
    noted = [name for name in UNUSED_KEYS if name in keys or name in flags]
    remarks = shortened + ([f"Keys accepted and not needed: {', '.join(noted)}"] if noted else [])
    remarks += _without_effect(config)
    if len(config.profile_steps) != 3 or config.profile_steps[-1] < 1:
        raise ValueError(
            f"profile_steps is {list(config.profile_steps)}: it takes three numbers, of steps to wait, to warm up, and "
            f"to profile, the last of them at least 1"
        )
    if config.profile == "torch" and sum(config.profile_steps) > config.num_iters:
        raise ValueError(
            f"profile_steps {list(config.profile_steps)} needs {sum(config.profile_steps)} steps, and num_iters is "
            f"{config.num_iters}: raise it, or wait for less steps"
        )
    remarks += _check_rollout(config)
    if config.time_limit is not None and config.checkpoint_every is None:
        raise ValueError("time_limit stops a run after a checkpoint, and checkpoint_every is None: leave one out")
    check_image(config)
    if config.clip_grad_norm == 0:
        raise ValueError("clip_grad_norm is 0, and so would be all gradients: give a norm, or None to leave them alone")
    for name in ("dropout", "drop_path"):
        if getattr(config, name) >= 1:
            raise ValueError(f"{name} is {getattr(config, name)}: it takes a probability below 1")
    if config.data_dir is not None:
        moved = move_data(config, config.data_dir)
        if moved == config and config.data_dir != "/data":
            remarks.append(moves_nothing(config.data_dir, f"no path of section {section!r} begins with /data"))
        config = moved
    return config, remarks


def _without_effect(config: Config) -> list[str]:
    """Return remarks on keys that were set, and change nothing."""
    remarks = []
    for flag, is_used, names in (
        ("--enable_jit", config.enable_jit, ("compile_modules", "compile_mode")),
        ("--num_data_workers", config.num_data_workers, ("read_depth",)),
        ("--profile torch", config.profile != "none", ("profile_steps", "profile_ranks", "profile_stacks")),
        ("--loss weighted", config.loss == "weighted", ("loss_channels", "loss_levels", "loss_latitude")),
        ("--optimizer AdamW", config.optimizer == "AdamW", ("weight_decay",)),
        ("--model_backend transformer-engine", config.model_backend != "pytorch", ("fp8",)),
        ("--shard none", config.shard == "none", ("bucket_cap_mb", "disable_broadcast_buffers")),
        ("--depth above 1", config.depth > 1, ("drop_path",)),  # the first block has none
        ("--context_parallel", config.context_parallel > 1, ("cp_attention", "cp_regather")),
        ("--checkpoint_every", config.checkpoint_every is not None, ("keep_checkpoints",)),
        ("--rollout_steps", config.rollout_steps != FIELDS["rollout_steps"].default, ("rollout_from",)),
    ):
        changed = (name for name in names if getattr(config, name) != FIELDS[name].default)
        remarks += [f"{name} changes nothing without {flag}" for name in changed if not is_used]
    if config.warmup > config.num_iters:
        remarks.append(f"warmup {config.warmup} is longer than num_iters {config.num_iters}: lr is never reached")
    return remarks


def check_image(config: Config) -> None:
    """Raise ValueError where the image has not two sides."""
    if len(config.img_size) != 2:
        raise ValueError(f"img_size is {list(config.img_size)}: it takes two numbers, rows and columns")


def move_data(config: Config, data_dir: str, before: str = "/data") -> Config:
    """Return the configuration with `data_dir` in place of `before` at the front of its paths."""
    paths = {name: str(getattr(config, name)) for name in FIELDS if name.endswith("_path")}
    moved = {n: data_dir + path.removeprefix(before) for n, path in paths.items() if path.startswith(f"{before}/")}
    return replace(config, data_dir=data_dir, **moved)


def moves_nothing(data_dir: str, why: str) -> str:
    """Return what to say of a data_dir that moves no path. Raises ValueError where it is not even there."""
    if not Path(data_dir).is_dir():
        raise ValueError(f"data_dir {data_dir!r} is not there, and {why}: leave it out, or name the paths one by one")
    return f"data_dir changes nothing: {why}"
