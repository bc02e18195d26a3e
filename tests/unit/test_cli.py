"""The command line refuses what it cannot do in one clear line, before any work begins, and exits with code 2."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from clawgym_env.cli import app
from clawgym_env.harnesses import HARNESSES
from clawgym_env.rendering.tokenizer import SHIPPED_TOKENIZER
from clawgym_env.store import RunFolder

ANYWHERE = ["--endpoint", "http://127.0.0.1:9/v1", "--harness", "scripted", "--sandbox", "process"]


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No harness is installed (nor does a bracket in a path mean anything), and the working directory is a new one."""
    monkeypatch.setenv("CLAWGYM_CACHE", str(tmp_path / "cache[bold]"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def clawgym(*arguments: str) -> Result:
    """Runs the command in this process, on a wide terminal."""
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "300"})


def refused(*arguments: str) -> str:
    """The one line that a refusal is."""
    result = clawgym(*arguments)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert result.stdout == ""
    line, rest = result.stderr.split("\n", 1)
    assert rest == "" and line.startswith("error: "), result.stderr
    return line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], "name a recipe (clawgym train quickstart) or a run to go on with (--resume RUN), not both"),
        (["train", "nope"], "unknown recipe 'nope'; there are: quickstart, sft, grpo"),
        (["train", "quickstart", "nope=1"], "nope: unknown key; there are: seed, suite, level, sandbox"),
        (["train", "quickstart", "grpo.nope=1"], "grpo.nope: unknown key; there are: steps, tasks, group, lr"),
        (["train", "quickstart", "grpo.steps=many"], "grpo.steps: Input should be a valid integer"),
        (["train", "quickstart", "temperature=-1"], "temperature: Input should be greater than 0"),
        (["train", "quickstart", "seed"], "'seed' is no setting: write key=value"),
        (["train", "quickstart", "seed=1", "seed=2"], "'seed' is set twice"),
        (["train", "quickstart", "harness=nope"], "unknown harness 'nope'"),
        (["train", "quickstart", "harness=scripted", "suite=nope"], "unknown task suite 'nope'"),
        (["train", "quickstart", "harness=scripted", "sandbox=nope"], "unknown sandbox 'nope'"),
        (["train", "grpo", "harness=scripted", "sandbox=process", "model=nope"], "nope is neither a run folder"),
        (["train", "quickstart", "harness=codex", "harness_options.tier=1"], "settings of harness 'codex': tier"),
        (["train", "mix", "harnesses=scripted", "held_out=none", "sandbox=process"], "no tool that runs commands"),
        (["train", "mix", "harnesses=pi,nope"], "unknown harness 'nope'"),
        (["train", "sft"], "rollouts: Field required"),
        (["train", "--resume", "nope"], "nope is not a run folder: it holds no config.json"),
        (["train", "quickstart", "--resume", "nope"], "not both"),
        (["train", "--resume", "nope", "--out", "elsewhere"], "a resumed run stays in its folder"),
        (["eval"], "say what to measure: --model RUN_OR_FOLDER or --endpoint URL"),
        (["eval", "--model", "nope", "--endpoint", "http://127.0.0.1:9/v1"], "say what to measure"),
        (["eval", "--model", "nope", "--harness", "scripted"], "nope is neither a run folder"),
        (["eval", "--endpoint", "http://127.0.0.1:9/v1", "--harness", "nope"], "unknown harness 'nope'"),
        (["eval", *ANYWHERE, "--tasks", "nope"], "unknown task suite 'nope'"),
        (["eval", *ANYWHERE, "--option", "wire=gemini"], "settings of harness 'scripted': wire"),
        (["eval", *ANYWHERE, "--option", "wire"], "'wire' is no setting"),
        (
            ["eval", *ANYWHERE, "--harness", "pi", "--option", "wire=x"],
            "option 'wire': write HARNESS.KEY=VALUE, for one",
        ),
        (["eval", *ANYWHERE, "--harness", "pi", "--option", "codex.wire=x"], "option 'codex': write HARNESS.KEY=VALUE"),
        (["eval", *ANYWHERE, "--harness", "scripted"], "a harness is named twice: scripted, scripted"),
        (["eval", *ANYWHERE, "--limit", "memory=1"], "unknown limit memory; there are: "),
        (["eval", *ANYWHERE, "--limit", "memory_mb=much"], "limit memory_mb: Input should be a valid integer"),
        (["eval", *ANYWHERE[:-1], "nope"], "unknown sandbox 'nope'"),
        (["report", "nope"], "nope is not a run folder"),
        (["harness", "install", "nope"], "no harness 'nope' to install; there are claude-code, codex,"),
        (["harness", "path", "scripted"], "no harness 'scripted' to install"),
        (["harness", "path", "pi"], "install it with: clawgym harness install pi"),
    ],
)
def test_refusals(arguments: list[str], message: str) -> None:
    assert message in refused(*arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ["eval", "--split", "nope"],
        ["eval", "--level", "4"],
        ["eval", "--n", "0"],
        ["eval", "--max-tokens", "0"],
        ["nope"],
    ],
)
def test_usage_errors_exit_with_2_as_well(arguments: list[str]) -> None:
    result = clawgym(*arguments)
    assert result.exit_code == 2 and "Error" in result.stderr and "Traceback" not in result.output


def test_a_refusal_is_one_line_of_a_real_process_too() -> None:
    command = [sys.executable, "-c", "from clawgym_env.cli import main; main()", "train", "--resume", "no[bold]where"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: no[bold]where is not a run folder: it holds no config.json\n"


def test_an_existing_run_is_not_trained_over(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.write_config({"recipe": "quickstart"})
    tiny = ["sandbox=process", "demos.rollouts=1", "sft.steps=0", "grpo.steps=0", "eval.test=0"]
    line = refused("train", "quickstart", "harness=scripted", *tiny, "--out", str(run.path))
    assert f"{run.path} holds a run already: continue it with --resume {run.path}" in line.split("error:")[1]
    assert run.config == {"recipe": "quickstart"} and run.metrics() == []


def test_an_existing_run_is_not_measured_over(tmp_path: Path) -> None:
    """Said before the evaluation, not after it."""
    run = RunFolder(tmp_path / "run")
    run.write_config({"recipe": "eval"})
    assert "holds a run already" in refused("eval", *ANYWHERE, "--out", str(run.path))


def test_a_refused_run_leaves_no_run_behind(tmp_path: Path) -> None:
    """So that the corrected command can use the same folder."""
    path = tmp_path / "run"
    refused("train", "quickstart", "harness=scripted", "suite=nope", "--out", str(path))
    assert not (path / "config.json").exists()


def test_a_model_folder_cannot_be_resumed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert "was not made by a recipe of this version" in refused("train", "--resume", str(tmp_path))


def test_harness_list() -> None:
    """Into a file it goes with a harness a line, whatever the width of the terminal."""
    lines = CliRunner().invoke(app, ["harness", "list"], env={"COLUMNS": "80"}).stdout.splitlines()
    rows = {line.split()[0]: line for line in lines}
    assert set(rows) == {"name", *HARNESSES}
    assert rows["pi"].rstrip().endswith(" no") and "MIT" in rows["pi"] and "openai_chat" in rows["pi"]
    assert all(word in rows["claude-code"] for word in ("proprietary", "anthropic_messages", "384 MB"))
    assert rows["scripted"].rstrip().endswith("built in")


def test_harness_list_shows_where_and_what_changed() -> None:
    from clawgym_env.harnesses.install import folder_of

    folder_of("pi").mkdir(parents=True)
    shown = clawgym("harness", "list").stdout
    assert "changed:" in shown and str(folder_of("pi")) in shown
    assert "install it again with: clawgym harness install pi" in refused("harness", "path", "pi")
    folder_of("codex").with_name("0.1.0").mkdir(parents=True)
    assert "no (there is 0.1.0)" in clawgym("harness", "list").stdout


@pytest.mark.parametrize("command", [["eval", "--endpoint", "http://127.0.0.1:9/v1"], ["train", "quickstart"]])
def test_proprietary_harnesses_are_never_installed_by_the_way(command: list[str]) -> None:
    option = "--harness=claude-code" if command[0] == "eval" else "harness=claude-code"
    said = refused(*command, option)
    assert "not open source" in said and "clawgym harness install claude-code" in said


def test_a_mix_says_what_only_its_user_may_install() -> None:
    said = refused("train", "mix", "harnesses=pi,claude-code", "held_out=none")
    assert "claude-code is not installed, and only you may do that" in said
    assert "clawgym harness install claude-code" in said and "name only pi" in said


def test_doctor_names_what_is_missing_and_the_way_out() -> None:
    result = clawgym("doctor")
    lines = {line[:19].strip(): line[19:].split(maxsplit=1) for line in result.stdout.splitlines()}
    assert lines["check"][0] == "state"
    assert lines["sandbox process"][0] == lines["harness scripted"][0] == "ok"
    state, detail = lines["harness pi"]
    assert state == "warning" and "clawgym harness install pi" in detail
    assert result.exit_code == (0 if lines["sandbox bubblewrap"][0] == "ok" else 1)


def test_doctor_looks_at_a_model() -> None:
    result = clawgym("doctor", "--model", str(SHIPPED_TOKENIZER), "--json")
    assert result.exit_code == 0, result.output
    checks = json.loads(result.stdout)
    assert {"name": "chat format", "state": "ok", "detail": "qwen3", "advice": ""} in checks
    shown = clawgym("doctor", "--model", str(SHIPPED_TOKENIZER)).stdout
    assert all(check["name"] in shown and check["detail"] in shown for check in checks)


def test_doctor_exits_with_1_where_something_failed() -> None:
    result = clawgym("doctor", "--model", str(SHIPPED_TOKENIZER), "--family", "llama-3", "--json")
    assert result.exit_code == 1
    assert [c["name"] for c in json.loads(result.stdout) if c["state"] == "failed"] == ["chat format"]


def test_help_names_every_command() -> None:
    said = clawgym("--help").stdout
    assert all(name in said for name in ("train", "eval", "report", "doctor", "harness"))


class Finisher(BaseHTTPRequestHandler):
    """An endpoint whose model writes one wrong file and then finishes."""

    keys: set[str | None]

    def do_POST(self) -> None:
        self.keys.add(self.headers.get("authorization"))
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        new = body["messages"][-1]["role"] == "user"
        arguments = {"path": "answer.txt", "content": "wrong"} if new else {}
        function = {"name": "write_file" if new else "finish", "arguments": json.dumps(arguments)}
        message = {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": function}],
        }
        answer = json.dumps({"choices": [{"message": message, "finish_reason": "tool_calls"}]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@contextmanager
def endpoint() -> Iterator[str]:
    """A real server on loopback."""
    Finisher.keys = set()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Finisher)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_an_endpoint_is_measured_under_two_harnesses(tmp_path: Path) -> None:
    path = tmp_path / "measured"
    agent = str(Path(__file__).parents[1] / "agents" / "shell_agent.py")
    argv = [sys.executable, "-I", agent, "{openai_base_url}", "{api_key}", "{model}", "{max_tokens}"]
    with endpoint() as url:
        options = ["--endpoint", url, "--harness", "scripted", "--harness", "command", "--sandbox", "process"]
        options += [
            "--option",
            f"command.argv={json.dumps(argv)}",
            "--option",
            "command.name=mine",
            "--limit",
            "pids=99",
        ]
        result = clawgym("eval", *options, "--n", "3", "--repeats", "2", "--max-calls", "3", "--out", str(path))
    assert result.exit_code == 0, result.output
    rows = {line.split()[0]: line.split() for line in result.stdout.splitlines() if line.strip()}
    assert rows["all"][-1] == "0/12"
    assert rows["scripted"][1:6] == ["0.0%", "0.0", "-", "0.0", "0/6"] and rows["command"][4:6] == ["0.0", "0/6"]
    stored = list(RunFolder.existing(path).rollouts("eval"))
    assert [r.harness for r in stored] == ["scripted"] * 6 + ["command"] * 6
    assert [r.task_id for r in stored[:6]] == [r.task_id for r in stored[6:]], "the same tasks under each"
    assert stored[0].task_id == stored[1].task_id != stored[2].task_id
    config = RunFolder.existing(path).config
    assert config["harnesses"]["command"]["options"]["name"] == "mine" and config["limits"]["pids"] == 99
    write_report = clawgym("report", str(path))
    assert write_report.exit_code == 0 and "By harness" in (path / "report.html").read_text()


def test_an_endpoint_is_measured_stored_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    path = tmp_path / "measured"
    with endpoint() as url:
        options = ["--endpoint", url, "--harness", "scripted", "--sandbox", "process", "--n", "3", "--out", str(path)]
        result = clawgym("eval", *options)
    assert result.exit_code == 0, result.output
    total = result.stdout.splitlines()[-1].split()
    assert total[0] == "all" and total[-1] == "0/3"
    assert Finisher.keys == {"Bearer sesame"}
    stored = list(RunFolder.existing(path).rollouts("eval"))
    assert [len(r.calls) for r in stored] == [2, 2, 2]
    assert {str(r.status) for r in stored} == {"completed"}
    reported = clawgym("report", str(path))
    assert reported.stdout == f"{path / 'report.html'}\n"
    assert "0/3" in (path / "report.html").read_text()


THEIRS = """
from clawgym_env.harnesses import HarnessInfo, ScriptedHarness

class Theirs(ScriptedHarness):
    greeting: str

    @property
    def info(self):
        return HarnessInfo("theirs", self.greeting, "1.0", "theirs", ("openai_chat",), 12, shell=None)
"""


@pytest.mark.parametrize("command", ["eval", "train"])
def test_a_harness_of_anyone_s_is_run_by_its_place(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has a size and settings that it cannot do without, as a package of ours would have."""
    (tmp_path / "theirs.py").write_text(THEIRS)
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "run"
    if command == "eval":
        with endpoint() as url:
            named = ["--harness", "theirs:Theirs", "--option", "greeting=hi", "--sandbox", "process"]
            result = clawgym("eval", "--endpoint", url, *named, "--n", "2", "--out", str(path))
    else:
        small = ["steps=1", "tasks=1", "group=2", "validate_every=1"]
        named = ["harness=theirs:Theirs", "harness_options.greeting=hi", "sandbox=process", "eval.test=1"]
        options = [*named, "eval.validation=1", "eval.greedy=0", *(f"grpo.{s}" for s in small)]
        result = clawgym("train", "grpo", *options, "--out", str(path))
    assert result.exit_code == 0, result.output
    batches = RunFolder.existing(path)
    assert {r.harness for name in batches.batches() for r in batches.rollouts(name)} == {"theirs:Theirs"}
