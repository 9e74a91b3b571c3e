"""How each client is run, and how a model must write the calls of its tools."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.install_clients import FOLDER, PINNED, PYTHON

KEY = "sk-dummy-0000"
NOWHERE = "http://127.0.0.1:9"  # nobody listens there: what a client wants from the network, it does not get
RUN_SECONDS = 300
GUIDE = FOLDER.parent / "docs" / "guide" / "agents.md"
SDK_AGENT = Path(__file__).with_name("sdk_agent.py")


def call(name: str, **arguments: Any) -> str:
    """A tool call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def chain(task: str, *steps: str) -> dict[str, str]:
    """Replies, one after the other, to a prompt with `TASK task`; the last is `DONE task`."""
    marks = [f"TASK {task}", *(f"STEP {task} {number}" for number in range(len(steps)))]
    said = [f"{mark}. {step}" for mark, step in zip(marks[1:], steps, strict=True)]
    return dict(zip(marks, [*said, f"DONE {task}"], strict=True))


class Client:
    """A client that works in `folder`/project, with an empty environment and a home of its own."""

    program: Path

    def __init__(self, folder: Path) -> None:
        self.home, self.project = folder / "client-home", folder / "project"
        self.home.mkdir()
        self.project.mkdir()

    def two_rounds(self, task: str) -> dict[str, str]:
        """The replies to a task that writes the file `task`.txt and looks at it."""
        path = self.project / f"{task}.txt"
        return chain(task, self.writing(path, task), self.looking(path))

    def writing(self, path: Path, text: str) -> str:
        raise NotImplementedError

    def looking(self, path: Path) -> str:
        raise NotImplementedError

    def team(self, one: str, two: str) -> dict[str, str]:
        """The replies of two agents that work at the same time, besides those to their tasks."""
        return self.two_rounds(one) | self.two_rounds(two)

    def run(self, url: str, task: str) -> str:
        """Do a task; what the client printed. Fails if it exits with an error."""
        raise NotImplementedError

    def run_team(self, url: str, one: str, two: str) -> str:
        """Do two tasks by two agents that take turns."""
        raise NotImplementedError

    def start(self, *arguments: str, **variables: str) -> str:
        """Run the program to its end."""
        network = {"HTTPS_PROXY": NOWHERE, "HTTP_PROXY": NOWHERE, "NO_PROXY": "127.0.0.1"}
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.home), **network, **variables}
        found = subprocess.run(
            [str(self.program), *arguments], cwd=self.project, env=environment, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=RUN_SECONDS, check=False,
        )  # fmt: skip
        assert found.returncode == 0, found.stdout + found.stderr
        return found.stdout


class TeamAgent(Client):
    """An agent with sub-agents of its own, which run at the same time. The names are those of its tools."""

    write: str
    path_field: str
    shell: str
    delegate: str
    kind: str  # of a sub-agent

    def writing(self, path: Path, text: str) -> str:
        return call(self.write, **{self.path_field: str(path)}, content=text)

    def looking(self, path: Path) -> str:
        return call(self.shell, command=f"cat {path}", description="Show the file")

    def team(self, one: str, two: str) -> dict[str, str]:
        """To `TASK both one two` it calls two sub-agents, and is finished when the second has reported."""
        calls = [
            call(self.delegate, description=f"Do {task}", prompt=f"TASK {task}", subagent_type=self.kind)
            for task in (one, two)
        ]
        said = {f"TASK both {one} {two}": f"I ask two. {''.join(calls)}", f"DONE {two}": "DONE both"}
        return super().team(one, two) | said

    def run_team(self, url: str, one: str, two: str) -> str:
        return self.run(url, f"both {one} {two}")


class ClaudeCode(TeamAgent):
    program = FOLDER / "node_modules" / ".bin" / "claude"
    write, path_field, shell, delegate, kind = "Write", "file_path", "Bash", "Agent", "general-purpose"

    def run(self, url: str, task: str) -> str:
        return self.start(
            "-p", f"TASK {task}", "--model", "claude-opus-4", "--allowedTools", "Write,Bash,Read,Agent",
            "--permission-mode", "acceptEdits",
            ANTHROPIC_BASE_URL=url, ANTHROPIC_AUTH_TOKEN=KEY, CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        )  # fmt: skip


class OpenCode(TeamAgent):
    program = FOLDER / "node_modules" / ".bin" / "opencode"
    write, path_field, shell, delegate, kind = "write", "filePath", "bash", "task", "general"

    def run(self, url: str, task: str) -> str:
        """With the configuration of the guide."""
        (recipe,) = re.findall(r"```json\n(.*?)```", GUIDE.read_text("utf-8"), re.DOTALL)
        config = self.home / ".config" / "opencode" / "opencode.json"
        config.parent.mkdir(parents=True, exist_ok=True)
        config.write_text(recipe.replace("http://127.0.0.1:8377", url), "utf-8")
        return self.start("run", f"TASK {task}")


class Codex(Client):
    """It offers sub-agents only as tools of OpenAI's servers: two conversations are resumed in turns."""

    program = FOLDER / "node_modules" / ".bin" / "codex"

    def writing(self, path: Path, text: str) -> str:
        return call("exec_command", cmd=f"echo {text} > {path}")

    def looking(self, path: Path) -> str:
        return call("exec_command", cmd=f"cat {path}")

    def team(self, one: str, two: str) -> dict[str, str]:
        return super().team(one, two) | super().team(f"more-{one}", f"more-{two}")

    def run(self, url: str, task: str) -> str:
        return self._exec(url, f"TASK {task}")[-1]

    def run_team(self, url: str, one: str, two: str) -> str:
        conversations = [(task, self._exec(url, f"TASK {task}")[0]) for task in (one, two)]
        return "".join(self._exec(url, "resume", number, f"TASK more-{task}")[-1] for task, number in conversations)

    def _exec(self, url: str, *arguments: str) -> tuple[str, str]:
        """The number of the conversation, and what was said last."""
        provider = f'{{name="Rekindle", base_url="{url}/v1", wire_api="responses", env_key="KEY"}}'
        chosen = ('model="any"', 'model_provider="rekindle"', f"model_providers.rekindle={provider}")
        settings = [word for setting in chosen for word in ("-c", setting)]
        events = self.start(
            "exec", *settings, "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox",
            *arguments, KEY=KEY,
        )  # fmt: skip
        numbers = re.findall(r'"thread_id":"([^"]+)"', events)
        return numbers[0], events


class SdkAgent(Client):
    """A library of PyPI under an agent of our own."""

    program = PYTHON

    def __init__(self, folder: Path, protocol: str) -> None:
        super().__init__(folder)
        self.protocol = protocol

    def writing(self, path: Path, text: str) -> str:
        return call("write_file", path=path.name, text=text)

    def looking(self, path: Path) -> str:
        return call("read_file", path=path.name)

    def run(self, url: str, task: str) -> str:
        return self._run(url, task)

    def run_team(self, url: str, one: str, two: str) -> str:
        return self._run(url, one, two)

    def _run(self, url: str, *tasks: str) -> str:
        return self.start(str(SDK_AGENT), self.protocol, url, str(self.project), *(f"TASK {task}" for task in tasks))


def make_client(name: str, folder: Path) -> Client:
    """A client by its name."""
    programs: dict[str, type[Client]] = {"claude": ClaudeCode, "codex": Codex, "opencode": OpenCode}
    return programs[name](folder) if name in programs else SdkAgent(folder, name)


PACKAGES: dict[str, str] = {
    "claude": "@anthropic-ai/claude-code",
    "codex": "@openai/codex",
    "opencode": "opencode-ai",
    "anthropic": "anthropic",
    "openai-chat": "openai",
    "openai-responses": "openai",
    "ollama": "ollama",
}


def why_not(name: str) -> str | None:
    """Why a client cannot be run; None if it can."""
    installed, package = FOLDER / "installed.json", PACKAGES[name]
    done: Sequence[str] = json.loads(installed.read_text("utf-8")) if installed.exists() else ()
    if package in done:
        return None
    if package in json.loads(PINNED.read_text("utf-8"))["npm"] and shutil.which("npm") is None:
        return f"npm is not there, and {package} comes from it"
    return f"{package} is not installed: `make test-clients` does that, and says why it could not"
