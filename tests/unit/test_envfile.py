"""Docker's env-file grammar: the handed cases, and bash and community.docker themselves where they read otherwise."""

import json
import subprocess
from pathlib import Path

import pytest
from ansible_collections.community.docker.plugins.module_utils._api.errors import DockerException
from ansible_collections.community.docker.plugins.module_utils._api.utils.utils import parse_env_file
from hypothesis import given
from hypothesis import strategies as st
from lockstep_core import envfile
from lockstep_core.errors import LockstepError

CASES = {
    case["id"]: case for case in map(json.loads, (Path(__file__).parent / "cases" / "C.jsonl").read_text().splitlines())
}
# The cases that give a whole file and what docker makes of it.
FILES = [name for name, case in CASES.items() if isinstance(case["input"], str)]


def bash(text: str, names: list[str], folder: Path) -> dict[str, str | None]:
    """What ``set -a; . file`` really leaves of these names (None: not set), with nothing set before."""
    (folder / "t.env").write_bytes(text.encode())
    show = "".join(f'printf "%s\\0" "${{{name}-(unset)}}";' for name in names)
    run = subprocess.run(
        ["/bin/bash", "-c", f"set -a; . ./t.env 2>/dev/null; {show}"],
        cwd=folder,
        check=False,
        capture_output=True,
        env={"PATH": "/usr/bin:/bin", "HOME": "/home/nobody"},
    )
    values = run.stdout.decode().split("\0")[:-1]
    return {name: None if value == "(unset)" else value for name, value in zip(names, values, strict=True)}


@pytest.mark.parametrize("name", FILES)
def test_docker_reads_the_handed_file_so(name: str) -> None:
    case = CASES[name]
    assert envfile.parse(case["input"]) == case["expected"]["docker_env_file"]
    assert envfile.parse(case["input"].encode()) == case["expected"]["docker_env_file"]


@pytest.mark.parametrize("name", FILES)
def test_other_readers_are_told_apart_as_the_case_says(name: str, tmp_path: Path) -> None:
    """Every value that the case gives for another reader: in ``traps`` where it differs from docker's, else equal."""
    case = CASES[name]
    docker = case["expected"]["docker_env_file"]
    traps = {str(trap["name"]): trap for trap in envfile.traps(case["input"])}
    columns = {"bash_source": "bash", "compose": "compose", "community_docker_env_file": "community_docker"}
    checked = 0
    for field, column in columns.items():
        expected = case["expected"].get(field)
        if not isinstance(expected, dict):
            continue
        for key, value in expected.items():
            if key == "error_first":
                # The first line of the case that bash stops at: what it does set is not what the file says.
                spaces = next(known for known in docker if known == "SPACES")
                assert traps[spaces]["bash"] is None
                assert bash(case["input"], [spaces], tmp_path)[spaces] is None
            else:
                seen = traps[key][column] if key in traps else docker[key]
                assert seen == value, (field, key)
            checked += 1
    assert checked or name == "C03"


def test_c03_nothing_is_expanded_and_bash_would() -> None:
    case = CASES["C03"]
    assert case["expected"]["bash_source"] == "expands all of them, and EXECUTES id"
    traps = {trap["name"]: trap for trap in envfile.traps(case["input"])}
    assert set(traps) == set(case["expected"]["docker_env_file"])
    assert {trap["bash"] for trap in traps.values()} == {None}
    # "expands $VAR in unquoted/double quoted"
    assert {name for name, trap in traps.items() if trap["compose"] is None} == {"DOLLAR", "BRACE", "A"}
    # What is rendered stays literal.
    env = case["expected"]["docker_env_file"]
    assert envfile.parse(envfile.render(env)) == env


def test_c04_docker_refuses_these_lines_in_these_words() -> None:
    case = CASES["C04"]
    for line, message in zip(case["input"], case["expected"]["docker_env_file_errors"], strict=True):
        with pytest.raises(LockstepError) as refusal:
            envfile.parse(line)
        assert message.removeprefix("docker: invalid env file (t.env): ") in str(refusal.value)
    # docker's exit status for it; ours is another, because nothing was started.
    assert case["expected"]["rc"] == 125


@pytest.mark.parametrize("name", FILES)
def test_bash_itself_agrees_with_what_is_said_of_it(name: str, tmp_path: Path) -> None:
    text = CASES[name]["input"]
    docker = envfile.parse(text)
    traps = {str(trap["name"]): trap["bash"] for trap in envfile.traps(text)}
    said = {key: traps.get(key, value) for key, value in docker.items()}
    real = bash(text, list(docker), tmp_path)
    for key, value in said.items():
        if value is not None:
            assert real[key] == value, key
        else:  # "would expand or run something, stop there, or not set the name"
            assert real[key] != docker[key], key


@pytest.mark.parametrize("name", FILES)
def test_community_docker_itself_agrees_with_what_is_said_of_it(name: str, tmp_path: Path) -> None:
    text = CASES[name]["input"]
    (tmp_path / "t.env").write_bytes(text.encode())
    try:
        real: dict[str, str | None] = parse_env_file(str(tmp_path / "t.env"))
    except DockerException:  # it takes an indented comment for a variable and refuses the file
        real = dict.fromkeys(envfile.parse(text))
    traps = {str(trap["name"]): trap["community_docker"] for trap in envfile.traps(text)}
    assert {key: traps.get(key, value) for key, value in envfile.parse(text).items()} == real


def test_a_bare_name_takes_the_clients_value() -> None:
    assert envfile.parse("A\nB=1\n", {"A": "from here"}) == {"A": "from here", "B": "1"}
    assert envfile.parse("A\nB=1\n") == {"B": "1"}


def test_lines_are_split_and_trimmed_as_go_does() -> None:
    # U+0085 is a line break to Python's splitlines() and white space to Go; U+001F is white space to Python only.
    assert envfile.parse("A=1\u0085B=2\n") == {"A": "1\u0085B=2"}
    assert envfile.parse("\u00a0\tA=1\n") == {"A": "1"}
    assert envfile.parse("\ufeffA=1\nA=2\n") == {"A": "2"}
    assert envfile.parse("\n  \n#\n   # x=1\n") == {}
    assert envfile.parse("\x1fA=1\n") == {"\x1fA": "1"}
    assert envfile.parse("A=1\r\r\n") == {"A": "1\r"}


def test_bytes_that_are_no_utf8_are_refused_with_their_line() -> None:
    with pytest.raises(LockstepError, match="invalid utf8 bytes at line 2"):
        envfile.parse(b"A=1\nB=\xff\n")


def test_a_line_may_have_65535_bytes_with_docker() -> None:
    assert len(envfile.parse("A=" + "x" * 65533)["A"]) == 65533
    with pytest.raises(LockstepError, match="token too long"):
        envfile.parse("A=" + "x" * 65534)
    assert envfile.render({"A": "x" * 65533})
    with pytest.raises(LockstepError, match="longer than 65535 bytes"):
        envfile.render({"A": "x" * 65534})


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("A", "one\ntwo", "newline"),
        ("A", "one\0two", "NUL"),
        ("A", "one\r", "carriage return"),
        ("A", "\ud800", "UTF-8"),
        ("", "x", "variable name"),
        ("A B", "x", "variable name"),
        ("A=B", "x", "variable name"),
        ("#A", "x", "variable name"),
        ("export A", "x", "variable name"),
        ("1A", "x", "variable name"),
        ("A-B", "x", "variable name"),
        ("A\n", "x", "variable name"),
    ],
)
def test_what_the_grammar_cannot_carry_is_refused(name: str, value: str, why: str) -> None:
    with pytest.raises(LockstepError, match=why):
        envfile.render({"GOOD": "1", name: value})


def test_a_value_that_is_no_text_is_refused() -> None:
    with pytest.raises(LockstepError, match="the value of A is int, not text"):
        envfile.render({"A": 1})  # type: ignore[dict-item]
    with pytest.raises(LockstepError, match="the value of A is no text"):
        envfile.mapping({"A": True})
    with pytest.raises(LockstepError, match="an environment is a mapping"):
        envfile.mapping(["A=1"])


VALUES = st.text(st.characters(exclude_characters="\n\0", exclude_categories=["Cs"])).filter(
    lambda text: not text.endswith("\r")
)


@given(st.dictionaries(st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,20}", fullmatch=True), VALUES))
def test_everything_else_arrives_to_the_byte(env: dict[str, str]) -> None:
    assert envfile.parse(envfile.render(env)) == env


def test_a_carriage_return_inside_a_value_arrives() -> None:
    assert envfile.parse(envfile.render({"A": "x\ry"})) == {"A": "x\ry"}


def test_the_hash_is_that_of_the_file(tmp_path: Path) -> None:
    env = {"B": "two words", "A": "", "C": 'quo"te'}
    (tmp_path / "e").write_text(envfile.render(env))
    run = subprocess.run(["sha256sum", "e"], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert run.stdout.split()[0] == envfile.sha256(env)
    assert (tmp_path / "e").read_text() == 'A=\nB=two words\nC=quo"te\n'


def test_differences_are_named_each_way() -> None:
    before, after = {"A": "1", "B": "2", "C": ""}, {"B": "3", "C": "", "D": "4"}
    assert envfile.diff(before, after) == {
        "added": {"D": "4"},
        "removed": {"A": "1"},
        "changed": {"B": {"before": "2", "after": "3"}},
    }
    assert envfile.diff_lines(before, after) == ["- A=1", "- B=2", "+ B=3", "+ D=4"]
    assert envfile.diff_lines(before, before) == []
