from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairtrial.secrets import Screen, Secrets

KEY = b"k" * 32
MARK = re.compile(r"‹secret ([^ ]+) hmac:[0-9a-f]{16}›")


def shown(text: str) -> str:
    return MARK.sub(r"<\1>", text)


@pytest.mark.parametrize(
    "name",
    [
        "API_KEY",
        "api-key",
        "--api-key",
        "KEY",
        "key",
        "APIKEY",
        "OPENAI_APIKEY",
        "HF_TOKEN",
        "--hf-token",
        "MY_SECRET_2",
        "DB_PASSWORD",
        "passwd",
        "SMTP_PASS",
        "GOOGLE_CREDENTIALS",
        "A_CREDENTIAL",
        "AUTH",
        "X-Auth-Y",
        "session-cookie",
        "SENTRY_DSN",
        "_KEY",
        "SITE_NAME",
        "--site-name",
        "site_name",
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert Secrets(KEY, ["Site-Name"]).named(name)


@pytest.mark.parametrize(
    "name",
    [
        "MONKEY",
        "KEYBOARD",
        "PATH",
        "AUTHOR",
        "TOKENIZER",
        "--max-tokens",
        "PASSAGE",
        "KEYS",
        "SECRETARY",
        "BYPASS",
        "XAUTHORITY",
        "--tokenizer-mode",
        "COMPASS_DIR",
        "",
        "--",
        "SITE_NAME_X",
        "DSNX",
    ],
)
def test_names_of_no_secrets(name: str) -> None:
    assert not Secrets(KEY, ["Site-Name"]).named(name)


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("API_KEY=abc", "API_KEY=<API_KEY>"),
        ("export HF_TOKEN='a b' PATH=/bin", "export HF_TOKEN='<HF_TOKEN>' PATH=/bin"),
        ('{"Env": ["API_KEY=a \\"b", "PATH=/x"]}', '{"Env": ["API_KEY=<API_KEY>", "PATH=/x"]}'),
        ('"Cmd": ["--api-key", "abc", "--port"]', '"Cmd": ["--api-key", "<api-key>", "--port"]'),
        ('{"api_key": "abc", "n": 1}', '{"api_key": "<api_key>", "n": 1}'),
        ('{\\"api_key\\": \\"abc\\", \\"n\\": 1}', '{\\"api_key\\": \\"<api_key>\\", \\"n\\": 1}'),
        ("Namespace(api_key=['abc'], port=1)", "Namespace(api_key=['<api_key>'], port=1)"),
        ("serve --api-key abc --port 1", "serve --api-key <api-key> --port 1"),
        ("sh -c 'X=1 API_KEY=abc serve'", "sh -c 'X=1 API_KEY=<API_KEY> serve'"),
        ("got the token API_KEY=abc", "got the token API_KEY=<API_KEY>"),
        ("redis://me:pw@host:1/2", "redis://me:<URL>@host:1/2"),
        ("http://host:80/a@b git://git@host/x", "http://host:80/a@b git://git@host/x"),
        ("MONKEY=abc KEYBOARD=us PATH=/bin AUTHOR=me", "MONKEY=abc KEYBOARD=us PATH=/bin AUTHOR=me"),
        ("5.0 tokens/s, token budget 7, --max-tokens 5", "5.0 tokens/s, token budget 7, --max-tokens 5"),
        ("API_KEY= --api-key --port", "API_KEY= --api-key --port"),
        ("SITE-NAME=abc SITE_NAMES=abc", "SITE-NAME=<SITE-NAME> SITE_NAMES=abc"),
    ],
)
def test_a_text_is_cleaned_where_a_secret_name_stands(text: str, cleaned: str) -> None:
    secrets = Secrets(KEY, ["site_name"])
    assert shown(secrets.clean(text)) == cleaned
    assert secrets.clean(secrets.clean(text)) == secrets.clean(text)


@pytest.mark.parametrize(
    ("argv", "cleaned"),
    [
        (["--api-key", "abc", "--port", "1"], ["--api-key", "<api-key>", "--port", "1"]),
        (["--api-key=a=b c", "x"], ["--api-key=<api-key>", "x"]),
        (["-e", "API_KEY=a b", "-e", "PATH=/bin"], ["-e", "API_KEY=<API_KEY>", "-e", "PATH=/bin"]),
        (["--env=API_KEY=abc"], ["--env=API_KEY=<API_KEY>"]),
        (["--api-key", "--port", "1"], ["--api-key", "--port", "1"]),
        (["key", "abc", "--monkey", "abc"], ["key", "abc", "--monkey", "abc"]),
        (["sh", "-c", "API_KEY=abc serve"], ["sh", "-c", "API_KEY=<API_KEY>"]),
        (["--db", "postgres://u:p@h/d"], ["--db", "postgres://u:<URL>@h/d"]),
    ],
)
def test_arguments(argv: list[str], cleaned: list[str]) -> None:
    assert [shown(argument) for argument in Secrets(KEY).argv(argv)] == cleaned


@pytest.mark.parametrize(
    ("environ", "argv"),
    [
        ({"API_KEY": 'long"secret\\é'}, []),
        ({}, ["--api-key", 'long"secret\\é']),
        ({}, ['--api-key=long"secret\\é']),
        ({}, ["-e", 'API_KEY=long"secret\\é']),
        ({"ARGS": "--port 1 --api-key long%22secret%5C%C3%A9"}, []),
        ({"DB": "redis://:long%22secret%5C%C3%A9@host/1"}, []),
        ({}, ["sh", "-c", "API_KEY=long%22secret%5C%C3%A9 serve"]),
    ],
)
def test_a_long_value_is_replaced_wherever_it_occurs(environ: dict[str, str], argv: list[str]) -> None:
    secrets = Secrets(KEY)
    secrets.learn(environ, argv)
    value = 'long"secret\\é' if "%" not in f"{environ}{argv}" else "long%22secret%5C%C3%A9"
    forms = [value, json.dumps(value), json.dumps(json.dumps(value)), json.dumps(value, ensure_ascii=False)]
    for form in [*forms, repr(value)]:
        cleaned = secrets.clean(f"x{form}y{form}z")
        assert len(MARK.findall(cleaned)) == 2, form
        assert "secret" not in MARK.sub("", cleaned)


def test_a_password_in_a_url_is_known_without_its_percent_signs() -> None:
    secrets = Secrets(KEY)
    secrets.learn({"DB": "redis://:p%40ss%2Fword@host/1"}, [])
    assert shown(secrets.clean("login p@ss/word, p%40ss%2Fword")) == "login <URL>, <URL>"


def test_a_short_value_is_left_where_its_name_does_not_stand() -> None:
    secrets = Secrets(KEY)
    secrets.learn({"API_KEY": "1234567", "OTHER_KEY": "12345678"}, [])
    assert shown(secrets.clean("1234567 12345678 API_KEY=1234567")) == "1234567 <OTHER_KEY> API_KEY=<API_KEY>"


def test_of_two_values_the_longer_is_replaced_whole() -> None:
    secrets = Secrets(KEY)
    secrets.learn({"A_KEY": "abcdefgh", "B_KEY": "abcdefgh-and-more"}, [])
    assert shown(secrets.clean("abcdefgh-and-more abcdefgh")) == "<B_KEY> <A_KEY>"


def test_each_line_of_a_key_of_many_lines_is_replaced() -> None:
    secrets = Secrets(KEY)
    secrets.learn({"TLS_KEY": "first line\nsecond line\n"}, [])
    assert shown(secrets.clean("> second line")) == "> <TLS_KEY>"


def test_marks_are_equal_for_equal_values_under_one_key_alone() -> None:
    one = Secrets(KEY).environ({"API_KEY": "a", "PATH": "/bin", "URL": "http://u:p@h"})
    assert one == Secrets(KEY).environ({"API_KEY": "a", "PATH": "/bin", "URL": "http://u:p@h"})
    assert one["PATH"] == "/bin"
    assert shown(one["URL"]) == "http://u:<URL>@h"
    assert Secrets(KEY).environ({"API_KEY": "b"})["API_KEY"] != one["API_KEY"]
    assert Secrets(b"other").environ({"API_KEY": "a"})["API_KEY"] != one["API_KEY"]
    assert Secrets(KEY).argv(["--key", "a"])[1] == Secrets(KEY).argv(["--key=a"])[0].split("=", 1)[1]


@given(st.text(min_size=8).filter(lambda value: len(value.strip()) >= 8), st.text(), st.text())
def test_no_learnt_value_survives(value: str, before: str, after: str) -> None:
    secrets = Secrets(KEY)
    secrets.learn({"API_KEY": value}, [])
    assert not any(value in piece for piece in MARK.split(secrets.clean(before + value + after))[::2])


@pytest.mark.parametrize(
    "text", ["key_" * 20_000 + "=", "a_" * 50_000, "\\" * 100_000, "://a:" * 30_000, 'API_KEY="' * 20_000]
)
def test_hostile_text_is_cleaned_in_linear_time(text: str) -> None:
    # Quadratic time would be many minutes here: the test would not end.
    Secrets(KEY).clean(text)


POEM = 'She said: "Où est\tla gare?"\nNobody (not even 😀) knew the way to\nthe station.'


@pytest.mark.parametrize(
    "held",
    [
        "said: " + POEM.replace("\n", " | "),
        json.dumps({"prompt": POEM}),
        json.dumps({"prompt": POEM}, ensure_ascii=False),
        json.dumps(json.dumps({"prompt": POEM})),
        f"params {POEM!r}",
        f"body {POEM.encode()!r}",
        "x" + POEM[30:54],
    ],
)
def test_a_line_that_holds_a_sent_text_is_dropped(held: str) -> None:
    assert Screen([POEM]).lines(f"before\n{held}\nafter") == ("before\nafter", 1)


def test_a_text_is_found_across_line_ends() -> None:
    assert Screen([POEM]).lines(f"before\n{POEM}\nafter\n") == ("before\nafter\n", 3)


def test_a_line_end_in_a_run_does_not_drop_its_neighbour() -> None:
    assert Screen([f"\n{POEM[:24]}\n"]).lines(f"before\n{POEM[:24]}\nafter") == ("before\nafter", 1)


def test_twenty_three_characters_may_stay() -> None:
    assert Screen([POEM]).lines(f"x{POEM[30:53]}x\n{POEM[30:54]}") == (f"x{POEM[30:53]}x", 1)


IDS = [7, 49151, 3, 12, 12, 0, 88]


@pytest.mark.parametrize(
    "held",
    [
        "[7, 49151, 3, 12, 12]",
        "ids=[49151,3,12,12,0],",
        "tensor([[3 12 12 0 88]])",
        "x (12), 12, 0, 88, 7, 49151 3 12 12 0",
        "3\t12  12,0 88",
    ],
)
def test_a_line_that_holds_sent_ids_is_dropped(held: str) -> None:
    assert Screen([IDS]).lines(f"before 1\n{held}\nafter 2\n") == ("before 1\nafter 2\n", 1)


@pytest.mark.parametrize(
    "kept",
    [
        "[7, 49151, 3, 12]",
        "7 49151 3 x 12 12",
        "77, 49151, 3, 12, 12",
        "7.49151.3.12.12",
        "12, 12, 3, 49151, 7",
        "9" * 5000 + " 1 2 3 4 5",
        "12:12:00 INFO 7 running, 3 waiting",
    ],
)
def test_a_line_of_other_numbers_is_kept(kept: str) -> None:
    assert Screen([IDS]).lines(kept) == (kept, 0)


def test_ids_one_a_line_are_found() -> None:
    body = json.dumps({"prompt": IDS}, indent=1)
    kept, dropped = Screen([IDS]).lines(f"before\n{body}\nafter")
    assert (kept, dropped) == ('before\n{\n "prompt": [\n ]\n}\nafter', 7)


def test_without_anything_sent_every_byte_is_kept() -> None:
    text = "a\r\n\n\\x\\ 1 2 3 4 5 6\x0b\u2028"
    assert Screen().lines(text) == (text, 0)
    assert Screen(["short", [1, 2, 3, 4]]).lines(text) == (text, 0)


plain = st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]), max_size=40)


@given(sent=plain, log=st.lists(plain | st.just("{sent}"), max_size=6), cut=st.integers(0, 30))
def test_lines_are_kept_if_and_only_if_they_hold_no_run(sent: str, log: list[str], cut: int) -> None:
    log = [line.replace("{sent}", "> " + sent[cut:]).replace("\\", "/") for line in log]
    sent = sent.replace("\\", "/")
    runs = [sent[at : at + 24] for at in range(len(sent) - 23)]
    expected = [line for line in log if not any(run in line for run in runs)]
    kept, dropped = Screen([sent]).lines("\n".join(log))
    assert kept == "\n".join(expected)
    assert dropped == len(log) - len(expected)


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=24), st.integers(0, 2))
def test_no_escaped_text_is_kept(sent: str, times: int) -> None:
    held = sent
    for _ in range(times + 1):
        held = json.dumps(held)
    assert Screen([sent]).lines(f"before\n{held}\nafter") == ("before\nafter", 1)


@given(st.lists(st.integers(0, 999), min_size=5, max_size=40), st.sampled_from([", ", ",", " ", "] [", "\n"]))
def test_no_list_of_sent_ids_is_kept(ids: list[int], separator: str) -> None:
    kept, dropped = Screen([ids]).lines(f"before\n[{separator.join(map(str, ids))}]\nafter")
    assert kept == "before\nafter"
    assert dropped >= 1


def test_a_long_prompt_is_learnt_and_found() -> None:
    ids = [(number * 7919) % 50_021 for number in range(150_000)]
    screen = Screen([ids])
    for at in (0, 75_000, 149_995):
        assert screen.lines(f"ids {ids[at : at + 5]}") == ("", 1)
