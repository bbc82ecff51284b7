"""Configuration keys: what is accepted, what is refused, and with which words."""

from __future__ import annotations

import contextlib
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftlog.config import MAX_INT64, ConfigDef, ConfigKey, Kind, Value, parse_duration_ms, parse_size_bytes
from raftlog.errors import InvalidConfig

KEYS = ConfigDef(
    "test config",
    (
        ConfigKey(name="retention.ms", kind="ms", default=1000, minimum=-1, doc="How long."),
        ConfigKey(name="segment.bytes", kind="bytes", default=1 << 30, minimum=1024, maximum=1 << 31, doc="How large."),
        ConfigKey(name="flush.messages", kind="int", default=1, minimum=1, doc="How many.", mirrors="log.flush"),
        ConfigKey(name="dirty.ratio", kind="float", default=0.5, minimum=0, maximum=1, doc="How dirty."),
        ConfigKey(name="insecure", kind="bool", default=False, own=True, doc="Whether | not."),
        ConfigKey(name="codec", kind="string", default="none", choices=("none", "zstd"), doc="Which."),
        ConfigKey(name="log.dirs", kind="list", default=(), doc="Where."),
        ConfigKey(
            name="even.number",
            kind="int",
            default=None,
            optional=True,
            doc="Only even ones.",
            check=lambda value: None if isinstance(value, int) and value % 2 == 0 else "it is odd",
        ),
    ),
)


@pytest.mark.parametrize(
    ("key", "raw", "value"),
    [
        ("retention.ms", 500, 500),
        ("retention.ms", "500", 500),
        ("retention.ms", "-1", -1),
        ("retention.ms", "500ms", 500),
        ("retention.ms", "10s", 10_000),
        ("retention.ms", " 5 m ", 300_000),
        ("retention.ms", "2h", 7_200_000),
        ("retention.ms", "7d", 604_800_000),
        ("segment.bytes", "64KiB", 65_536),
        ("segment.bytes", "16MiB", 16 << 20),
        ("segment.bytes", "1GiB", 1 << 30),
        ("segment.bytes", "4096B", 4096),
        ("dirty.ratio", "0.25", 0.25),
        ("dirty.ratio", 1, 1.0),
        ("insecure", "TRUE", True),
        ("insecure", False, False),
        ("codec", "zstd", "zstd"),
        ("log.dirs", "/a, /b", ("/a", "/b")),
        ("log.dirs", ["/a", "/b"], ("/a", "/b")),
        ("log.dirs", "", ()),
        ("even.number", "", None),
        ("even.number", 4, 4),
    ],
)
def test_a_value_is_parsed(key: str, raw: object, value: object) -> None:
    assert KEYS.parse({key: raw}) == {key: value}


@pytest.mark.parametrize(
    ("key", "raw", "words"),
    [
        ("retention.ms", "soon", "retention.ms='soon': expected milliseconds, or a number with a unit such as"),
        ("retention.ms", "-1s", "expected milliseconds"),
        ("retention.ms", -2, "retention.ms=-2: expected .* at least -1"),
        ("retention.ms", True, "retention.ms=True: expected milliseconds"),
        ("retention.ms", 0.5, "expected milliseconds"),
        ("retention.ms", "1e3", "expected milliseconds"),
        ("retention.ms", MAX_INT64 + 1, f"expected milliseconds.*; the largest number is {MAX_INT64}"),
        ("retention.ms", f"{MAX_INT64}s", "expected milliseconds"),
        ("retention.ms", "9" * 10_000, "expected milliseconds"),
        ("segment.bytes", "64KB", "expected bytes, or a number with a unit such as 64KiB"),
        ("segment.bytes", "10", "from 1024 to 2147483648"),
        ("flush.messages", "1KiB", "expected a whole number"),
        ("dirty.ratio", "nan", "expected a number, from 0 to 1"),
        ("dirty.ratio", 1.5, "expected a number, from 0 to 1"),
        ("dirty.ratio", 10**400, "a number of 1329 bits: expected a number"),
        ("insecure", "yes", "insecure='yes': expected true or false"),
        ("insecure", 1, "expected true or false"),
        ("codec", "brotli", "codec='brotli': expected one of none, zstd"),
        ("log.dirs", ["/a,b"], "expected a list of texts"),
        ("log.dirs", "/a,,/b", "expected a list of texts"),
        ("log.dirs", [1], "expected a list of texts"),
        ("even.number", 3, "even.number=3: it is odd"),
    ],
)
def test_a_bad_value_is_refused_with_the_value_and_what_was_expected(key: str, raw: object, words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        KEYS.parse({key: raw})


def test_an_unknown_key_is_an_error_with_the_nearest_suggestion() -> None:
    with pytest.raises(InvalidConfig, match=r"unknown test config 'retention.m'; did you mean 'retention.ms'\?"):
        KEYS.parse({"retention.m": 1})
    with pytest.raises(InvalidConfig, match=r"did you mean 'segment.bytes'\?"):
        KEYS.parse({"segments_byte": 1})
    with pytest.raises(InvalidConfig, match=r"unknown test config 'zzz'$"):
        KEYS.parse({"zzz": 1})


def test_underscores_stand_for_dots_but_one_key_is_given_once() -> None:
    assert KEYS.parse({"flush_messages": 3}) == {"flush.messages": 3}
    with pytest.raises(InvalidConfig, match=r"flush\.messages is given twice"):
        KEYS.parse({"flush.messages": 3, "flush_messages": 3})


def test_resolve_fills_in_defaults() -> None:
    values = KEYS.resolve({"codec": "zstd"})
    assert values["codec"] == "zstd"
    assert values["retention.ms"] == 1000
    assert values.keys() == {key.name for key in KEYS}


def test_canonical_spelling_is_sorted_and_plain() -> None:
    raw = {"segment_bytes": "1MiB", "retention.ms": "7d", "insecure": "True", "log.dirs": ["/b", "/a"]}
    assert list(KEYS.canonical(raw).items()) == [
        ("insecure", "true"),
        ("log.dirs", "/b,/a"),
        ("retention.ms", "604800000"),
        ("segment.bytes", "1048576"),
    ]


_TEXT = st.text(string.ascii_letters + string.digits + "/._-", min_size=1)
_VALUES: dict[Kind, st.SearchStrategy[object]] = {
    "int": st.integers(-MAX_INT64 - 1, MAX_INT64),
    "ms": st.integers(-MAX_INT64 - 1, MAX_INT64),
    "bytes": st.integers(-MAX_INT64 - 1, MAX_INT64),
    "float": st.floats(allow_nan=False, allow_infinity=False),
    "bool": st.booleans(),
    "string": st.text(),
    "list": st.lists(_TEXT).map(tuple),
}


@given(st.data())
def test_canonical_spelling_parses_to_the_same_value(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(sorted(_VALUES)))
    empty: dict[str, Value] = {"string": "", "list": ()}
    default = empty.get(kind)
    key = ConfigKey(name="key", kind=kind, default=default, optional=default is None, doc="A key.")
    value = key.parse(data.draw(_VALUES[kind]))
    assert key.parse(key.format(value)) == value


@given(
    st.one_of(
        st.none(), st.text(), st.integers(), st.floats(), st.booleans(), st.binary(), st.lists(st.text()), st.just({})
    ),
    st.sampled_from(list(KEYS)),
)
def test_whatever_is_written_is_a_value_or_an_invalid_config(raw: object, key: ConfigKey) -> None:
    with contextlib.suppress(InvalidConfig):
        assert key.parse(key.format(key.parse(raw))) == key.parse(raw)


def test_toml_takes_dotted_keys_and_tables_alike() -> None:
    raw = KEYS.from_toml('insecure = true\n"codec" = "zstd"\nlog.dirs = ["/a"]\n[segment]\nbytes = "1MiB"\n')
    assert KEYS.parse(raw) == {"insecure": True, "codec": "zstd", "log.dirs": ("/a",), "segment.bytes": 1 << 20}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("insecure = \n", "server.toml is not valid TOML: .*line 1"),
        ("insecure = true\ninsecure = false", "server.toml is not valid TOML"),
        (f"flush.messages = {'9' * 5000}", "server.toml is not valid TOML"),
        ("[segment]\nbyte = 1", r"server.toml: unknown test config 'segment.byte'; did you mean 'segment.bytes'\?"),
    ],
)
def test_bad_toml_is_refused_by_file_name(text: str, words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        KEYS.from_toml(text, "server.toml")


def test_environment_sets_keys() -> None:
    environ = {"RAFTLOG_LOG_DIRS": "/a,/b", "RAFTLOG_RETENTION_MS": "1d", "HOME": "/root", "RAFTLOG_BOOTSTRAP": "x"}
    raw = KEYS.from_environment(environ, ignore=("RAFTLOG_BOOTSTRAP",))
    assert KEYS.parse(raw) == {"log.dirs": ("/a", "/b"), "retention.ms": 86_400_000}
    with pytest.raises(InvalidConfig, match=r"RAFTLOG_LOG_DIR: unknown test config 'log.dir'; did you mean 'log.dirs'"):
        KEYS.from_environment({"RAFTLOG_LOG_DIR": "/a"})


def test_variables_of_a_kubernetes_service_named_raftlog_are_not_keys() -> None:
    environ = {
        "RAFTLOG_PORT": "tcp://10.0.0.1:9092",
        "RAFTLOG_PORT_9092_TCP": "tcp://10.0.0.1:9092",
        "RAFTLOG_PORT_9092_TCP_ADDR": "10.0.0.1",
        "RAFTLOG_SERVICE_HOST": "10.0.0.1",
        "RAFTLOG_SERVICE_PORT_CLIENT": "9092",
        "RAFTLOG_HEADLESS_SERVICE_HOST": "10.0.0.2",
    }
    assert KEYS.from_environment(environ) == {}


def test_markdown_documents_every_key() -> None:
    lines = KEYS.to_markdown().splitlines()
    assert len(lines) == 2 + len(KEYS)
    assert all(line.replace("\\|", "").count("|") == 7 for line in lines)
    assert "| `flush.messages` | int | `1` | a whole number, at least 1 | `log.flush` | How many. |" in lines
    assert "| `insecure` | bool | `false` | true or false | — | Whether \\| not. |" in lines
    assert "| `log.dirs` | list | — | a list of texts, or texts with commas between them | same | Where. |" in lines


def test_kafka_keys() -> None:
    assert KEYS.key("retention.ms").kafka_key == "retention.ms"
    assert KEYS.key("flush.messages").kafka_key == "log.flush"
    assert KEYS.key("insecure").kafka_key is None


def test_durations_and_sizes_can_be_parsed_on_their_own() -> None:
    assert parse_duration_ms("90s") == 90_000
    assert parse_size_bytes("2TiB") == 2 << 40
    with pytest.raises(ValueError):
        parse_size_bytes("10ms")
