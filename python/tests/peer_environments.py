"""The adapters of `stapo.environments` with the real packages, through the driver that the trainer sends to interpreters.

Run by environments.sh with `reasoning-gym`, `textarena` and `openenv-core` from PyPI.
"""

import json
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "python/stapo/environments"
DRIVER = (ROOT / "crates/stapo-rl/src/reward/verdict/driver.py").read_text()
BOOTSTRAP = "import json, sys; exec(json.loads(sys.stdin.readline()))"


class Driven:
    """An interpreter that serves the environment of a file, as the trainer starts one."""

    def __init__(self, name):
        command = [sys.executable, "-I", "-B", "-c", BOOTSTRAP, str(FOLDER / f"{name}.py"), "Environment", "environment"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.ask(DRIVER) == {}
        self.n_episodes = 0

    def ask(self, line):
        self.process.stdin.write(json.dumps(line) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def play(self, row, policy):
        """Plays one episode; returns the observations and the last line."""
        self.n_episodes += 1
        turns, observations = [], [row["prompt"]]
        while True:
            turns.append(policy(observations))
            request = {"episode": self.n_episodes, "id": row["id"], "prompt": row["prompt"], "reference": row["answer"]}
            line = self.ask({**request, "row": row, "turns": turns})
            assert "error" not in line, line["error"]
            if line.get("done"):
                return observations, line
            observations.append(line["observation"])

    def close(self):
        self.process.stdin.close()
        self.process.wait(10)


def rows_of(name, *arguments):
    out = subprocess.run([sys.executable, FOLDER / f"{name}.py", *arguments], capture_output=True, text=True, check=True).stdout
    return [json.loads(line) for line in out.splitlines()]


def check_reasoning_gym():
    driven = Driven("reasoning_gym_env")
    n_right = 0
    names = ["leg_counting", "basic_arithmetic", "base_conversion", "chain_sum", "gcd", "lcm", "prime_factorization", "spell_backward"]
    for name in names:
        rows = rows_of("reasoning_gym_env", name, "--size", "5", "--seed", "3")
        assert len(rows) == 5 and len({row["id"] for row in rows}) == 5
        for row in rows:
            _, right = driven.play(row, lambda seen: f"It is \\boxed{{{row['answer']}}}.")
            assert right["reward"] == 1.0 and right["verdict"] == "right", (row, right)
            _, wrong = driven.play(row, lambda seen: "\\boxed{surely not this}")
            assert wrong["reward"] < 1.0 and wrong["verdict"] in ("wrong", "unparsable"), (row, wrong)
            _, none = driven.play(row, lambda seen: "I do not know.")
            assert none["verdict"] == "no_answer", none
            n_right += 1
    driven.close()
    print(f"environments: reasoning-gym, {n_right} rows of {len(names)} generators")


def halving(low, high):
    """A policy that halves the interval by what the game says."""
    bounds = [low, high]

    def policy(seen):
        if len(seen) > 1:
            side = 0 if "higher" in seen[-1] else 1
            bounds[side] = policy.last + (1 if side == 0 else -1)
        policy.last = sum(bounds) // 2
        return f"I say [{policy.last}]"

    return policy


def check_textarena():
    driven = Driven("textarena_env")
    rows = rows_of("textarena_env", "GuessTheNumber-v0", "--size", "6")
    played = []
    for row in rows:
        low, high = map(int, re.search(r"between (\d+) and (\d+)", row["prompt"]).groups())
        seen, line = driven.play(row, halving(low, high))
        assert line["verdict"] == "right" and line["reward"] > 0, line
        assert all("I say" not in text and text.count("\n") < 3 for text in seen[1:]), seen
        played.append((seen, line))
    # A game is a function of its seed and the turns.
    again = driven.play(rows[0], halving(low, high))
    assert played[0][0] == again[0] and played[0][1]["reward"] == again[1]["reward"], (played[0], again)
    _, lost = driven.play(rows[0], lambda seen: "no number")
    assert lost["verdict"] == "wrong", lost
    driven.close()
    print(f"environments: textarena, {len(played)} games won in {sum(len(seen) for seen, _ in played)} turns")


def serve_openenv(port):
    import uvicorn
    from openenv.core.env_server.http_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Say(Action):
        message: str

    class Heard(Observation):
        text: str

    class Countdown(Environment):
        """Counts down to 0; a reward for naming the right number every time."""

        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed=None, episode_id=None, **_):
            self.number = 2 + (seed or 0)
            return Heard(text=f"from {self.number}")

        def step(self, action, timeout_s=None, **_):
            if action.message != str(self.number):
                return Heard(text="wrong", reward=0.0, done=True)
            self.number -= 1
            return Heard(text=f"then {self.number}", reward=float(self.number == 0), done=self.number == 0)

        @property
        def state(self):
            return State(step_count=0)

    app = create_fastapi_app(Countdown, Say, Heard, max_concurrent_envs=8)
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="critical"))
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.05)


def check_openenv():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    serve_openenv(port)
    rows = rows_of("openenv_env", f"http://127.0.0.1:{port}", "--observation", "text", "--size", "3")
    assert [row["prompt"] for row in rows] == ["from 2", "from 3", "from 4"], rows
    driven = Driven("openenv_env")
    for row in rows:
        seen, line = driven.play(row, lambda seen: seen[-1].split()[-1])
        assert line["verdict"] == "right" and len(seen) == 2 + row["seed"], (seen, line)
        _, wrong = driven.play(row, lambda seen: "7")
        assert wrong["verdict"] == "wrong", wrong
    driven.close()
    print(f"environments: OpenEnv, {len(rows)} episodes on a server")


check_reasoning_gym()
check_textarena()
check_openenv()
