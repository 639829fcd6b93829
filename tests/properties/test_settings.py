"""Any YAML and any flags: a configuration that can be written and read again, or one line that says what is wrong."""

import dataclasses

import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from utils.config.reader import load_config
from utils.config.settings import FIELDS, Config

NAMES = st.sampled_from([name for name in FIELDS if name != "config"])
NUMBERS = st.one_of(st.integers(-3, 100), st.integers(), st.floats(), st.booleans())
WORDS = st.sampled_from(
    ["none", "None", "bf16", "auto", "10m", "cosine", "true", "1e3", "", "-1", "LAMB", "gather", "\n"]
)
SINGLE = st.one_of(NUMBERS, WORDS, st.none(), st.text(max_size=4))
VALUES = st.one_of(SINGLE, st.lists(SINGLE, max_size=3), st.dictionaries(st.text(max_size=2), NUMBERS, max_size=1))


def one_line(error: ValueError) -> bool:
    return "\n" not in str(error) and len(str(error)) > 10


def loaded(path, flags: list[str]) -> Config | None:
    """Return a configuration, or None after a line that says why there is none."""
    try:
        return load_config(["--yaml_config", str(path), "--config=s", *flags], chapter=3)[0]
    except ValueError as error:
        assert one_line(error), repr(str(error))
        return None


def check(config: Config | None, folder) -> None:
    if config is not None:
        (folder / "again.yaml").write_text(config.to_yaml())
        again = loaded(folder / "again.yaml", [])
        assert again == dataclasses.replace(config, local_batch_size=None, data_dir=None, resume="none")


@given(section=st.dictionaries(NAMES, VALUES, max_size=5))
@example(section={"run_num": "a\nb"})
@example(section={"lr": float("nan")})
def test_any_section(tmp_path, section):
    (tmp_path / "a.yaml").write_text(yaml.safe_dump({"s": section}))
    check(loaded(tmp_path / "a.yaml", []), tmp_path)


@given(flags=st.lists(st.tuples(NAMES, SINGLE), max_size=4))
def test_any_flags(tmp_path, flags):
    (tmp_path / "a.yaml").write_text("s: {}")
    check(loaded(tmp_path / "a.yaml", [f"--{name}={value}" for name, value in flags]), tmp_path)


@given(text=st.one_of(st.text(max_size=60), st.text("s:{}[]&*!<>| \n-'\"#%ab1,?", max_size=60)))
@example(text="s: {lr: 1., lr: 2.}")
@example(text="&a [*a]")
@example(text="s: &a {b: *a}")
@example(text="!!python/object/apply:os.system ['touch /tmp/x']")
@example(text="[" * 3000)
def test_any_text(tmp_path, text):
    (tmp_path / "a.yaml").write_bytes(text.encode("utf-8", "surrogatepass"))
    check(loaded(tmp_path / "a.yaml", []), tmp_path)


@given(content=st.binary(max_size=60))
def test_any_bytes(tmp_path, content):
    (tmp_path / "a.yaml").write_bytes(content)
    check(loaded(tmp_path / "a.yaml", []), tmp_path)
