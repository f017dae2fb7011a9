"""Test that unmeasurable input is refused with one clear line, and leaves nothing running."""

import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from connector_tax.ab.arguments import parse
from connector_tax.ab.ask import ANSWER_S, Asked
from connector_tax.ab.design import engine_section, planned_load, study_config
from connector_tax.artifacts.study_records import StudyDocument
from connector_tax.servers.command import expanded, running_url, split_command
from connector_tax.servers.kinds import ServerError
from connector_tax.study.design import resolve
from connector_tax.study.device import hold_devices
from tests.ab.commands import ENGINE, NO_NUMBER, STOPPED, STOPPED_LINE, Ab
from tests.workflow.harness import device_for, gone

CHAT = f"{sys.executable} {Path(__file__).with_name('stub_server.py')} {{port}}"
# Ends like vLLM: one process has a cause, the others end because it has ended.
TRACEBACKS = (
    'bash -c \'echo "WARNING 1 [u.py:1] this can cause an (OSError: too many files)";'
    ' for i in {{1..50}}; do echo "(Worker pid=1) ERROR 1 [w.py:1] MemoryError: 15 GiB"; done;'
    ' for i in {{1..50}}; do echo "RuntimeError: see above {port}"; done; exit 1\''
)
BARE = "bash -c 'echo \"Exception: no CPU here\"; exit 1; echo {port}'"
# Behaves like LMCacheConnectorV1 on a CPU.
DEAD = (
    "bash -c 'echo Creating v1 connector with name: LMCacheConnectorV1;"
    f" echo Failed to initialize LMCacheManager; exec {ENGINE}'"
)
ROOTS_FOLDER = str(Path("~root/m").expanduser())
NOWHERE = "http://localhost:"
RUNNING = {"--baseline": None, "--candidate": None, "--baseline-url": f"{NOWHERE}1",
           "--candidate-url": f"{NOWHERE}2"}  # fmt: skip

KEYED = {"--api-key-env": "MY_TOKEN"}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"--rate": "0"}, "--rate: found '0'; allowed: a number above 0"),
        ({"--rate": "many"}, "--rate: found 'many'"),
        ({"--shape": "64"}, "--shape: found '64'; allowed: input x output tokens"),
        ({"--shape": "64x1"}, "--shape: found 1 output token"),
        ({"--baseline": "vllm serve M"}, "--baseline: found no {port}"),
        ({"--candidate": "vllm serve M"}, "--candidate: found no {port}"),
        (
            {"--candidate": "vllm serve M --uds /s {port}"},
            "--candidate: found --uds, a Unix socket",
        ),
        ({"--baseline": "serve --host a.sock"}, "--baseline: found a.sock, a Unix socket"),
        ({"--max ": "3%", "--max": "5%"}, "--max: found several bounds of each judged metric"),
        ({"--max ": "ttft_p50=3%", "--max": "ttft_p50=5%"}, "several bounds of ttft_p50; allowed:"),
        ({"--candidate": "run_2=serve {port}"}, "--candidate: found the name 'run_2'"),
        ({"--candidate": "baseline=serve {port}"}, "--candidate: found the name 'baseline'"),
        ({"--candidate": "serve '{port}"}, '--candidate: found "serve \'{port}"'),
        ({"--baseline": "serve {port} --api-key sk-abcdefghijklmnop0123"}, "looks like a secret"),
        ({"--metric": "ttft_p99"}, "--metric: invalid choice: 'ttft_p99'"),
        (
            {"--metric": "e2e_p90", "--max": "ttft_p50=5%"},
            "not judged (--metric); allowed: e2e_p90",
        ),
        ({"--concurrency": "0"}, "--concurrency: found '0'; allowed: 1 to 1024"),
        ({"--concurrency": "8"}, "--concurrency: found with --rate, --trace or --prompts"),
        ({"--metric": "goodput"}, "--metric goodput needs --goodput"),
        ({"--metric": "tokens_per_s"}, "--metric tokens_per_s needs --concurrency"),
        ({"--goodput": "ttft"}, "--goodput: found 'ttft'; allowed: LATENCY:MS"),
        ({"--goodput": "ttft:9,ttft:8"}, "--goodput: the same latency is given twice"),
        ({"--margin": "3"}, "--margin: found '3'; allowed: a percentage"),
        ({"--blocks": "2"}, "--blocks: found '2'; allowed: 3 to 100"),
        ({"--beside": "cache --port 5"}, "--beside: found no {port}"),
        ({"--env": "1x=1"}, "--env: found '1x=1'; allowed: NAME=VALUE"),
        ({"--env": "PYTHONPATH=/x"}, "--env PYTHONPATH: give the folders by --pythonpath"),
        ({"--env": "AGENTIC_STEP_LOG_PATH=/x"}, "--env AGENTIC_STEP_LOG_PATH: ab sets this"),
        ({"--env": "API_KEY=abcdefghijklmnop"}, "--env API_KEY: found what looks like a secret"),
        ({"--pythonpath": "nowhere"}, "--pythonpath: found 'nowhere'; allowed: an existing folder"),
        ({"--candidate ": "again {port}"}, "--candidate: found several without a name"),
        ({"--candidate-url": "http://127.0.0.1:1"}, "not allowed with argument --candidate"),
        ({"--baseline-url": "http://127.0.0.1:1"}, "not allowed with argument --baseline"),
        ({**RUNNING, "--beside": "cache {port}"}, "--beside: found with a URL"),
        ({**RUNNING, "--candidate-url": "http://127.0.0.1:1"}, "127.0.0.1:1' again; allowed: each"),
        ({"--beside": "c {port} --api-key sk-abcdefghijklmnop0123"}, "--beside: found what looks"),
        ({"--candidate": "Fast=serve {port}"}, "--candidate: found the name 'Fast'; allowed: at"),
        ({"--candidate": "with-dash=serve {port}"}, "--candidate: found the name 'with-dash'"),
        (
            {"--baseline": "serve {port} 2>&1 | tee log"},
            "found >&, and a command is started",
        ),
        ({"--baseline": "cd x && serve {port}"}, "allowed: bash -c 'cd x && serve {port}'"),
        ({"--baseline": "serve `date` {port}"}, "found `date`, and a command is started without"),
        ({"--baseline": 'serve "$(date)" {port}'}, 'found "$(date)", and a command is started'),
        ({"--baseline": "serve /et[c] {port}"}, "allowed: bash -c 'serve /et[c] {port}'"),
        ({"--baseline": "serve {port} ${DIR:-x}"}, "found ${DIR:-x}, and a command is started"),
        ({"--baseline": "serve {port} $1"}, "found $1, and a command is started without a shell"),
        ({"--baseline": 'serve "$$" {port}'}, 'found "$$", and a command is started'),
        ({"--baseline": "serve $'\\n' {port}"}, "found $'\\n', and a command is started without"),
        ({"--baseline": 'serve $"m" {port}'}, 'found $"m", and a command is started without'),
        ({"--baseline": "serve $[8+1] {port}"}, "found $[8+1], and a command is started without"),
        ({"--baseline": "P=/a:~/b serve {port}"}, "found P=/a:~/b, and a command is started"),
        ({"--baseline": "P=~:/b serve {port}"}, "found P=~:/b, and a command is started"),
        (
            {"--baseline": "X={c,d} serve {a,b} {port}"},
            "found {a,b}: a shell makes several words of it, and a command is started without a"
            " shell; allowed: bash -c 'X={c,d} serve {a,b} {port}'; for one word: '{a,b}'",
        ),
        ({"--baseline": "serve {1..3} {port}"}, "found {1..3}: a shell makes several words"),
        ({"--baseline": "serve {port} x{y,${FLAGS}}"}, "found x{y,${FLAGS}}: a shell makes"),
        (
            {"--candidate": 'serve --c {"a":True,"b":{port}}'},
            """for one word: '{"a":True,"b":{port}}'""",
        ),
        ({"--baseline": "serve $FLAGS {port}"}, "splits into several words, and a command is"),
        ({"--baseline": "serve --x=${FLAGS} {port}"}, 'to keep one word, write "${FLAGS}"'),
        ({"--baseline": "serve {port} # fast"}, "found #, and a command is started without"),
        ({"--candidate": "serve {port} $NO_SUCH"}, "found $NO_SUCH, which is not set"),
        ({"--candidate": "serve {port} $MY_TOKEN"}, "found $MY_TOKEN, which looks like a secret"),
        ({**RUNNING, "--candidate-url": "ftp://x"}, "allowed: http[s]://HOST[:PORT][/v1], or NAME"),
        ({**RUNNING, "--candidate-url": "x=http://127.0.0.1:1/a"}, "a base that ends in /v1"),
        ({**RUNNING, "--baseline-url": "unix:///run/vllm.sock"}, "a Unix socket; allowed: http"),
        ({**RUNNING, "--baseline-url": "/run/vllm.sock"}, "a Unix socket; allowed: http"),
        ({**RUNNING, "--baseline-url": "http://me:abcdefghijklmnop@h"}, "a user name or password"),
        ({**RUNNING, "--baseline-url": "http://h:99999"}, "allowed: http[s]://HOST[:PORT][/v1]"),
        ({"--baseline": "http://127.0.0.1:8000/foo"}, "found the path /foo; allowed: none, or a"),
        ({"--export-markdown": "nowhere/x.md"}, "found 'nowhere/x.md'; allowed: a file in an"),
        ({"--export-markdown": "/"}, "--export-markdown: found '/'; allowed: a file in an"),
        ({"--api-key-env": "sk-abcdefghijklmnop0123"}, "found no valid variable name"),
        ({"--api-key-env": "hf_abcdefghijklmnop0123"}, "found no valid variable name"),
        ({"--api-key-env": "NO_SUCH"}, "--api-key-env: NO_SUCH is not set in the environment"),
        ({"--api-key-header": "api-key"}, "--api-key-header has no effect without --api-key-env"),
        ({**KEYED, "--api-key-header": "api key"}, "header name 'api key' is invalid"),
        ({**KEYED, "--api-key-header": "sk-abcdefghijklmnop0123"}, "found a key (not shown)"),
        ({**RUNNING, "--ca-file": "absent"}, "--ca-file and --insecure need an https URL"),
        ({"--env": "A=\udcff"}, "argument 10: found bytes that are not UTF-8; allowed: UTF-8"),
    ],
)
def test_bad_arguments_are_refused_with_one_line(
    changed: dict[str, str | None],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MY_TOKEN", "abcdefghijklmnop0123")
    monkeypatch.setenv("FLAGS", "--a 1 --b 2")
    options: dict[str, str | None] = {
        "--baseline": "serve {port}",
        "--candidate": "serve {port}",
        "--rate": "20",
        "--shape": "64x8",
        **changed,
    }
    # A key with a trailing blank gives the same option a second time.
    given = [(name.strip(), value) for name, value in options.items() if value is not None]
    with pytest.raises(SystemExit) as ended:
        parse([text for pair in given for text in pair])
    assert ended.value.code == 64
    message = capsys.readouterr().err
    assert words in message
    assert "abcdefghijklmnop" not in message
    assert len(message.splitlines()) == 1


def test_assignment_before_a_command_is_not_a_candidate_name() -> None:
    options = parse(["--baseline", "Level=1 serve {port}", "--candidate", "LEVEL=1 serve {port}",
                     "--rate", "1", "--shape", "8x8"])  # fmt: skip
    assert options.candidate == [("candidate", "LEVEL=1 serve {port}")]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('serve "$DIR"/m {port}', ["serve", "/a b/m", "{port}"]),
        ("serve $NAME/m $NONE x$NONE {port}", ["serve", "/n*/m", "x", "{port}"]),
        ("\n serve {port} '\n'\n", ["serve", "{port}", "\n"]),
        ('serve "${DIR}/m" ~/x {port}', ["serve", "/a b/m", "/home/me/x", "{port}"]),
        ("serve '$DIR' \\$DIR a~b {port}", ["serve", "$DIR", "$DIR", "a~b", "{port}"]),
        ('serve --c {"a":"$DIR|x"} {port}', ["serve", "--c", '{"a":"$DIR|x"}', "{port}"]),
        (
            'serve {port} --c {"p":{beside1.port}}',
            ["serve", "{port}", "--c", '{"p":{beside1.port}}'],
        ),
        ("serve 'a|b' \"c;d\" {port}", ["serve", "a|b", "c;d", "{port}"]),
        ("serve \\\n --port \\\n{port} '\\\n'", ["serve", "--port", "{port}", "\\\n"]),
        ("HF_HOME=~/x serve --m=~/x {port}", ["HF_HOME=/home/me/x", "serve", "--m=~/x", "{port}"]),
        ("serve ~root/m ~no_user/m {port}", ["serve", ROOTS_FOLDER, "~no_user/m", "{port}"]),
        ("serve a{$NAME}b '$1' {port}", ["serve", "a{/n*}b", "$1", "{port}"]),
        (r'serve "\$i ${DIR}\"\n" {port}', ["serve", r'$i /a b"\n', "{port}"]),
        ("serve '`a`' it\\'s /n*o?[x] {port}", ["serve", "`a`", "it's", "/n*o?[x]", "{port}"]),
        ("X={a,b} serve {port} {x {a..bc}", ["X={a,b}", "serve", "{port}", "{x", "{a..bc}"]),
        ("serve '{a,b}' \\{c,d} {port},{port}", ["serve", "{a,b}", "{c,d}", "{port},{port}"]),
    ],
)
def test_variables_are_expanded_like_in_a_shell(
    line: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIR", "/a b")
    monkeypatch.setenv("NAME", "/n*")
    monkeypatch.setenv("NONE", " ")
    monkeypatch.setenv("HOME", "/home/me")
    options = parse(
        ["--baseline", line, "--candidate", f"x={line}", "--rate", "1", "--shape", "8x8"]
    )
    assert split_command(options.baseline) == words
    ((name, candidate),) = options.candidate
    assert (name, split_command(candidate)) == ("x", words)


def test_environment_variable_is_expanded_like_an_assignment_of_a_shell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    options = parse(["--baseline", "serve {port}", "--candidate", "serve {port}", "--rate", "1",
                     "--shape", "8x8", "--env", "A=~/x:/y~:~/z:~no_user",
                     "--env", "B={1..3},{a,b}"])  # fmt: skip
    # The words that bash assigns, too.
    assert options.env == [("A", "/home/me/x:/y~:/home/me/z:~no_user"), ("B", "{1..3},{a,b}")]


def test_rates_that_print_alike_are_one_rate() -> None:
    servers = ["--baseline", "serve {port}", "--candidate", "serve {port}", "--shape", "8x8"]
    assert parse([*servers, "--rate", "20", "--rate", "20.000001"]).rate == [20.0]


def test_expanded_line_is_not_expanded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRICE", "$5 `x`")
    monkeypatch.setenv("COST", "$5`x`*")
    once = expanded('serve "$PRICE" $COST', os.environ)
    assert split_command(once) == ["serve", "$5 `x`", "$5`x`*"]
    assert expanded(once, os.environ) == once


def test_limits_of_goodput_are_accepted_in_every_form() -> None:
    for form in (
        ["ttft:200,tpot:20"],
        ["ttft:200", "tpot:20"],
        ["ttft:200", "--goodput", "tpot:20"],
    ):
        options = parse(["--baseline", "serve {port}", "--candidate", "serve {port}", "--rate", "1",
                         "--shape", "8x8", "--goodput", *form])  # fmt: skip
        assert options.goodput == {"ttft": 200.0, "tpot": 20.0}


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://localhost:8000/v1", "http://127.0.0.1:8000"),
        ("http://localhost", "http://127.0.0.1"),
        ("http://localhost.lan:1", "http://localhost.lan:1"),
        # The server's certificate is issued for this name.
        ("https://localhost:8443/v1", "https://localhost:8443"),
    ],
)
def test_running_url_keeps_the_host_name_that_a_certificate_needs(text: str, url: str) -> None:
    assert running_url(text) == url


def test_running_servers_get_new_prompts_in_each_comparison() -> None:
    def seed(*servers: str) -> int | None:
        found: int | None = parse([*servers, "--rate", "1", "--shape", "8x8"]).seed
        return found

    commands = ["--baseline", "serve {port}", "--candidate", "serve {port}"]
    assert seed(*commands) == 1
    urls = ["--baseline-url", "http://127.0.0.1:1", "--candidate-url", "http://127.0.0.1:2"]
    assert seed(*urls) is None
    assert seed(*urls, "--seed", "0") == 0


def test_suggested_shell_line_keeps_json_and_is_accepted() -> None:
    for end in ("| cat", "\ntrue"):
        line = f"""printf '%s\\n' {{port}} {{"a": "b c"}} 'd e' {end}"""
        with pytest.raises(ServerError) as refused:
            expanded(line, {})
        offered = str(refused.value).partition("allowed: ")[2]
        command = split_command(expanded(offered, {}))
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout == '{port}\n{"a": "b c"}\nd e\n'


def test_candidate_may_be_named_like_a_configuration() -> None:
    names = ["plain", "nixl_both", "offloading"]
    servers = [part for name in names for part in ("--candidate", f"{name}=serve {{port}}")]
    document = designed("--baseline", "run {port}", *servers)
    assert [entry["id"] for entry in document["configurations"]] == ["baseline", *names]
    assert [entry["connector"] for entry in document["configurations"]] == [None] * 4


def test_candidate_is_labelled_with_the_difference_between_two_scripts() -> None:
    script = "bash -c 'cd /models && exec serve --port {port}"
    document = designed("--baseline", f"{script}'", "--candidate", f"{script} --fast'")
    assert [entry["label"] for entry in document["configurations"]] == ["baseline", "--fast"]


def designed(*servers: str) -> StudyDocument:
    """Return the study of a comparison without querying its servers."""
    options = parse([*servers, "--rate", "1", "--shape", "8x8"])
    served: Any = {
        "model": "m", "vocab_size": 100, "chat": False, "body": "bare", "exact_output": True,
        "max_model_len": None, "version": None, "counters": False, "no_steps": "none",
    }  # fmt: skip
    baseline = Asked(served, {}, 1.0, "server by its command")
    load = planned_load(options, 1.0, 1.0)
    return resolve(study_config(options, engine_section(options), baseline, load), "design")


@pytest.mark.parametrize(
    ("further", "changed", "words"),
    [
        (
            [],
            {"baseline": "nosuch {port}"},
            "the command nosuch, which does not exist in PATH; install",
        ),
        ([], {"candidate": "FAST=vllm no {port}"}, "not exist in PATH (FAST=... sets a variable);"),
        ([], {"baseline": "exec x {port}"}, "part of a shell; allowed: bash -c 'exec x {port}'"),
        ([], {"baseline": "false {port}"}, "baseline: the server ended with status 1 before"),
        ([], {"baseline": TRACEBACKS}, "before it was ready\nfirst error: MemoryError: 15 GiB\n"),
        ([], {"baseline": BARE}, "first error: Exception: no CPU here\nlog: "),
        (
            [],
            {"baseline": f"{CHAT} 401"},
            "answers 401: the server requires a key, and none is sent",
        ),
        ([], {"candidate": CHAT}, "another model than the baseline: model embedded-model -> stub"),
        (
            [],
            {"candidate": f"{CHAT} same"},
            "candidate: its answers do not have the requested length",
        ),
        ([], {"candidate": f"{CHAT} same short"}, "at most 40, by /v1/models of candidate"),
        ([], {"candidate": f"{CHAT} garbage"}, "/v1/models answers '\"Hello\"'; allowed"),
        ([], {"candidate": DEAD}, "candidate: its connector cannot transfer: the server answers, "),
        ([], {"shape": "8000x800"}, "8800 tokens; allowed: at most 8192"),
        ([], {"rate": "5000"}, "--rate: found 5000; the baseline serves about"),
        ([], {"baseline": f"{NOWHERE}1", "candidate": f"{NOWHERE}2"}, "at http://127.0.0.1:2\n"),
        (["--model", "other"], {}, "/v1/models names embedded-model; --model names other"),
        (["--ready-timeout", "1"], {"baseline": "sleep 99 {port}"}, "not ready after 1 s (--ready"),
        ([], {"baseline": "bash -c 'echo started {port}'"}, "with status 0, and left no server"),
    ],
)
def test_error_names_a_server_that_cannot_be_measured(
    tmp_path: Path,
    further: list[str],
    changed: dict[str, str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    status = Ab(tmp_path, *further, **changed).call(monkeypatch)
    message = capsys.readouterr().err
    assert words in message, message
    assert status == NO_NUMBER
    assert gone(tmp_path, timeout_s=2) == []


def test_engine_core_that_dies_while_its_server_is_queried_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    core = tmp_path / "VLLM::EngineCor"
    shutil.copy(shutil.which("sleep") or "", core)
    began = time.monotonic()
    assert Ab(tmp_path, candidate=f"{CHAT} core={core}").call(monkeypatch) == NO_NUMBER
    assert "died while it was queried" in capsys.readouterr().err
    assert time.monotonic() - began < ANSWER_S


def test_second_comparison_on_the_same_device_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shortly = functools.partial(hold_devices, wait_s=0.1)
    monkeypatch.setattr("connector_tax.ab.__main__.hold_devices", shortly)
    with hold_devices([device_for(tmp_path)], purpose="comparison"):
        assert Ab(tmp_path).call(monkeypatch) == NO_NUMBER
    said = capsys.readouterr().err
    assert f"waiting for pid {os.getpid()}, user" in said
    assert "is in use by another measurement" in said


def test_failure_is_reported_by_the_status_when_nobody_reads_the_progress(tmp_path: Path) -> None:
    with Ab(tmp_path, baseline="nosuch {port}").start(subprocess.PIPE) as process:
        assert process.stderr is not None
        process.stderr.close()
    assert process.returncode == NO_NUMBER


def test_internal_error_has_no_status_of_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("connector_tax.ab.__main__.remove_temporaries", lambda _: 1 / 0)
    assert Ab(tmp_path).call(monkeypatch) == NO_NUMBER
    message = capsys.readouterr().err
    assert "Traceback" in message
    assert message.splitlines()[-1].startswith("ab: internal error (ZeroDivisionError); measure")


@pytest.mark.workflow
def test_ctrl_c_while_servers_are_queried_leaves_no_process(tmp_path: Path) -> None:
    command = Ab(tmp_path)
    with command.start(subprocess.PIPE) as process:
        assert process.stderr is not None
        told = []
        for line in process.stderr:
            told.append(line)
            if line.startswith("querying baseline"):
                # Sent to the whole foreground group, as a terminal does.
                os.killpg(process.pid, signal.SIGINT)
    assert process.returncode == STOPPED, "".join(told)
    assert told[-1] == STOPPED_LINE
    assert "Traceback" not in "".join(told)
    assert gone(tmp_path, timeout_s=2) == []


@pytest.mark.workflow
def test_minutes_too_short_for_three_blocks_give_a_warning_first(tmp_path: Path) -> None:
    command = Ab(tmp_path)
    at = command.command.index("--blocks")
    command.command[at : at + 2] = ["--minutes", "0.01"]
    told = []
    with command.start(subprocess.PIPE) as process:
        assert process.stderr is not None
        for line in process.stderr:
            told.append(line)
            if line.startswith("block 1"):
                process.terminate()
    assert any(
        line.startswith("warning: --minutes: found 0.01; the first 3 blocks") for line in told
    ), told
    assert gone(tmp_path, timeout_s=2) == []


def test_error_names_a_file_in_place_of_the_study_folder(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "mine").touch()
    done = Ab(tmp_path).run()
    assert done.returncode == NO_NUMBER
    assert done.stderr == "ab: results/mine is not a folder; give this comparison another --name\n"


def test_different_arguments_under_one_name_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "results" / "mine"
    folder.mkdir(parents=True)
    (folder / "ab.json").write_text('{"rate": [4.0]}')
    assert Ab(tmp_path).call(monkeypatch) == NO_NUMBER
    message = capsys.readouterr().err
    assert "rate: [4.0] -> [20.0]" in message or "rate[0]: 4.0 -> 20.0" in message
    assert "another --name" in message
