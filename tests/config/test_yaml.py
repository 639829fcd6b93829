"""A configuration that somebody made to be odd: one line says so."""

import os

import pytest

from utils.config.reader import load_config

LISTS = "a0: &a0 [x]\n" + "".join(f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 9)}]\n" for i in range(9))
REPEATED = "t: &t " + "x" * 10**6 + "\nl: [" + ", ".join(["*t"] * 200) + "]\n"
RECURSIVE = "x: &a [*a, b]\n"
RECURSIVE += "".join(f"a{i}: &a{i} [*a{i}, {', '.join([f'*a{i - 1}' if i else 'x'] * 9)}]\n" for i in range(6))
MERGES = "m0: &m0 {a: 1}\n"
MERGES += "".join(f"m{i + 1}: &m{i + 1} {{<<: [{', '.join([f'*m{i}'] * 9)}]}}\n" for i in range(9))


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "text, told",
    [
        (LISTS, "it unfolds to more than 100,000 values"), (MERGES, "it unfolds to more than 100,000 values"),
        (REPEATED, "it unfolds to more than 100,000 values"),
        ("x:\n  ? [a, b]\n  : 1\n", "the key in line 2 is no word: write NAME: VALUE"),
        ("a: &a [*a]", "an alias stands in what it names: write it out"),
        (RECURSIVE, "an alias stands in what it names"), ("1: {}", "must hold named sections"),
        ('x: {lr: !!int ""}', "lr is '': it takes float"), ('x: {lr: !!timestamp "x"}', "lr is 'x': it takes float"),
        ('x: {lr: !!binary "x"}', "is not valid YAML"),
        ("x: {1: 2}", "has the key 1 in section 'x': keys are names"),
        (f"x: {{lr: {'[' * 2000}{']' * 2000}}}", "is not valid YAML"),
    ],
)  # fmt: skip
def test_yaml_that_is_made_to_be_odd(tmp_path, text, told):
    """Few lines can unfold to billions of values; a value can have a tag that it does not fit."""
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(ValueError, match=told) as error:
        load_config(["--yaml_config", str(tmp_path / "x.yaml"), "--config", "x"])
    assert "\n" not in str(error.value)


def test_a_key_that_stands_twice(tmp_path):
    """YAML takes the last one, in silence."""
    for text, told in (
        ("x:\n  lr: 1.\n  depth: 2\n  lr: 2.\n", "'lr' stands in line 2 and again in line 4: remove one"),
        ("x: {}\ny: {}\nx: {depth: 2}\n", "'x' stands in line 1 and again in line 3: remove one"),
    ):
        (tmp_path / "x.yaml").write_text(text)
        with pytest.raises(ValueError, match=rf"x\.yaml is not valid YAML: {told}") as error:
            load_config(["--yaml_config", str(tmp_path / "x.yaml"), "--config", "x"])
        assert "\n" not in str(error.value)


def test_yaml_that_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(ValueError, match=r"^[^ ]*pipe\.yaml is no file, but a pipe, a socket or a device"):
        load_config(["--yaml_config", str(tmp_path / "pipe.yaml")])
    (tmp_path / "latin.yaml").write_bytes(b"x: {run_num: \xe9}")
    with pytest.raises(ValueError, match="latin.yaml is not valid YAML: 'utf-8' codec"):
        load_config(["--yaml_config", str(tmp_path / "latin.yaml")])
    with (tmp_path / "large.yaml").open("w") as file:
        file.truncate(2**24 + 1)
    with pytest.raises(ValueError, match="has 16,777,217 bytes: no such file has more"):
        load_config(["--yaml_config", str(tmp_path / "large.yaml")])
