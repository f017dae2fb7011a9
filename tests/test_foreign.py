"""Test that secrets in foreign text are found and never shown, and control sequences removed."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector_tax.ab.arguments import parse
from connector_tax.config import ConfigError, refuse_secrets
from connector_tax.foreign import REDACTED, LogSecrets, is_secret, one_line, printable

PLAIN = "TheSecret01"
IN_COMMANDS = [
    f"DB_PASS={PLAIN} serve {{port}}",
    f"serve {{port}} --pass {PLAIN}",
    f"serve {{port}} --redis-pass={PLAIN}",
    f"""serve {{port}} --store '{{"redis_pass": "{PLAIN}"}}'""",
    f"serve {{port}} --ngc nvapi-{PLAIN}{PLAIN}",
    f"serve {{port}} --tell https://hooks.slack.com/services/T0/B0/{PLAIN}",
    f"curl -u user:{PLAIN} 127.0.0.1:{{port}}",
    f"curl --user user:{PLAIN} 127.0.0.1:{{port}}",
    f"sshpass -p {PLAIN} ssh host serve {{port}}",
    f"serve {{port}} --login {PLAIN}",
    f"serve {{port}} --cookie session={PLAIN}",
    f"curl -H 'Cookie: session={PLAIN}' 127.0.0.1:{{port}}",
    f"curl -H 'X-Api-Key: {PLAIN}' 127.0.0.1:{{port}}",
]
VARIABLES = [
    f"DB_PASS={PLAIN}",
    "DB_PASS=12345678",
    f"REDIS_COOKIE={PLAIN}",
    f"NGC=nvapi-{PLAIN}{PLAIN}",
    f"HOOK=https://hooks.slack.com/services/T0/B0/{PLAIN}",
    f"RUN=sshpass -p {PLAIN} ssh host",
]
HARMLESS = [
    "docker run -u 1000:1000 --network host image {port}",
    "python -u serve.py {port}",
    "serve {port} --tokenizer ./model --num-key-value-heads 8",
    """serve {port} --compilation-config '{"pass_config": {"fuse": "yes"}}'""",
    "serve {port} --bypass-cache lru --compass north",
    "DB_PASS=$DB_PASS serve {port}",
]


@pytest.mark.parametrize("command", IN_COMMANDS)
@pytest.mark.parametrize("option", ["--baseline", "--candidate", "--beside"])
def test_secret_in_a_command_line_is_refused_and_not_shown(
    command: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    servers = {"--baseline": "serve {port}", "--candidate": "serve {port}", option: command}
    with pytest.raises(SystemExit) as ended:
        parse([t for pair in servers.items() for t in pair] + ["--rate", "1", "--shape", "64x8"])
    assert ended.value.code == 64
    message = capsys.readouterr().err
    assert "found what looks like a secret" in message
    assert PLAIN not in message


@pytest.mark.parametrize("variable", VARIABLES)
def test_secret_in_env_is_refused_and_not_shown(
    variable: str, capsys: pytest.CaptureFixture[str]
) -> None:
    servers = ["--baseline", "serve {port}", "--candidate", "serve {port}", "--env", variable]
    with pytest.raises(SystemExit):
        parse([*servers, "--rate", "1", "--shape", "64x8"])
    message = capsys.readouterr().err
    assert "found what looks like a secret" in message
    assert PLAIN not in message


@pytest.mark.parametrize("command", IN_COMMANDS)
@pytest.mark.parametrize("split", [False, True], ids=["text", "list"])
def test_secret_in_a_configuration_is_refused_and_not_shown(command: str, split: bool) -> None:
    value = [part.strip("'") for part in re.split(r" (?![a-z]*=|\")", command)]
    with pytest.raises(ConfigError, match=r"companion.*found what looks like a secret") as refused:
        refuse_secrets({"companion": value if split else command}, "mine.yaml")
    assert PLAIN not in str(refused.value)


@pytest.mark.parametrize("command", HARMLESS)
def test_command_without_a_secret_is_accepted(command: str) -> None:
    assert not is_secret("command", command)
    refuse_secrets({"companion": command.split()}, "mine.yaml")


def test_text_that_is_nested_too_deeply_for_json_is_searched_as_text() -> None:
    refuse_secrets({"companion": "[" * 100_000}, "mine.yaml")
    with pytest.raises(ConfigError, match="found what looks like a secret"):
        refuse_secrets({"companion": "[" * 100_000 + f" nvapi-{PLAIN}{PLAIN}"}, "mine.yaml")


@pytest.mark.parametrize(
    "line",
    [
        f"DB_PASS={PLAIN}",
        f'declare -x NGC_API_KEY="{PLAIN}"',
        f"environ({{'HOME': '/root', 'HF_TOKEN': '{PLAIN}', 'TERM': 'x'}})",
        f"args: Namespace(api_key=['{PLAIN}'], port=1)",
        f"calling with Authorization: Bearer {PLAIN}",
        f"connecting to redis://:{PLAIN}@cache:6379",
        "the value alone: s3cr3t",
        "it is tok-0123456789, by a name that may be a secret's",
        f"nvapi-{PLAIN}{PLAIN}",
    ],
)
def test_log_line_with_a_secret_is_removed(line: str) -> None:
    secrets = LogSecrets({"STORE_PASS": "s3cr3t", "NAMED_TOKEN": "tok-0123456789", "KEY": "plain"})
    assert secrets.redacted(f"before\n{line}\nafter") == (f"before\n{REDACTED}\nafter", 1)


def test_log_of_a_server_without_secrets_is_kept() -> None:
    text = (
        "non-default args: {'model': './m', 'tokenizer_mode': 'auto', 'api_key': None}\n"
        "INFO 12-01 engine tokenizer='./m', trust_remote_code=False, kv_cache_dtype=auto\n"
        "special tokens: bos_token: '<s>', pad_token='<pad>', max_num_batched_tokens: 2048\n"
        "google-auth==2.62.2\nGPU KV cache size: 1,000 tokens\nplain sentence, s3cr3ts\n"
    )
    secrets = LogSecrets({"STORE_PASS": "s3cr3t", "XAUTHORITY": "/root", "KEY": "plain"})
    assert secrets.redacted(text) == (text, 0)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;owned\x07title", "title"),
        ("\x1b]0;owned\x1b\\title", "title"),
        ("\x1b[2J\x1b[Hcleared", "cleared"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x9b2Jcleared", "cleared"),
        ("\x1bcreset", "reset"),
        ("\x1bP1$r\x1b\\answer", "answer"),
        ("over\rwritten\x08\x7f", "overwritten"),
        ("tab\tand\nline\r\nGrüße", "tab\tand\nline\nGrüße"),
        ("\x1b[", ""),
    ],
)
def test_escape_sequence_is_not_printed(text: str, shown: str) -> None:
    assert printable(text) == shown


@pytest.mark.parametrize("part", ["y", "y=", "A=", "--a", "eyJ-", "y: ", "-u", "://a:", '"a"'])
@pytest.mark.timeout(30)
def test_long_word_is_searched_in_linear_time(part: str) -> None:
    text = part * (200_000 // len(part))
    assert not is_secret("command", text)
    assert LogSecrets({}).redacted(text) == (text, 0)


@given(st.text())
def test_foreign_text_is_one_line_of_printable_characters(text: str) -> None:
    shown = one_line(text)
    assert len(shown.splitlines()) <= 1
    assert not re.search(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2028\u2029\ud800-\udfff]", shown)
    assert one_line(shown) == shown


def test_line_end_in_foreign_text_is_shown_as_an_escape_sequence() -> None:
    assert one_line("Grüße\nPASS\x1b[2J") == "Grüße\\u{a}PASS\\u{1b}[2J"


@given(st.text())
def test_printable_text_holds_no_control_character(text: str) -> None:
    shown = printable(text)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown)
    assert printable(shown) == shown
