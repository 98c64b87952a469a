"""Takes the picture of `stapo serve` that README.md shows: trains the built-in model, or takes a run, and photographs it.

    python3 bench/serve/picture.py [--stapo target/release/stapo] [--run RUN] [--out docs/images/serve.png]

Needs chromium, which is steered over a pipe by the Chrome DevTools Protocol.
"""

import argparse
import base64
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path

SETTINGS = ["steps=60", "rollout.problems_per_step=16", "update.problems_per_minibatch=8", "evaluation.problems=64",
            "evaluation.every_steps=5", "record.responses=64", "record.responses_every_steps=5",
            'objective={preset="stapo", masks=[{kind="spurious", tau_p=0.02}]}']
SIZE = {"width": 1240, "height": 800}


class Browser:
    def __init__(self, profile):
        flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --hide-scrollbars"
        command = f'exec chromium {flags} --remote-debugging-pipe --user-data-dir={profile} about:blank'
        shell = ["sh", "-c", command + " 3<&0 4>&1 </dev/null >/dev/null 2>&1"]
        self.process = subprocess.Popen(shell, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.n, self.session, self.bytes = 0, None, b""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def call(self, method, **params):
        self.n += 1
        message = {"id": self.n, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        self.process.stdin.write(json.dumps(message).encode() + b"\0")
        self.process.stdin.flush()
        while True:
            while b"\0" not in self.bytes:
                self.bytes += os.read(self.process.stdout.fileno(), 1 << 16)
            answer, self.bytes = self.bytes.split(b"\0", 1)
            answer = json.loads(answer)
            if answer.get("id") == self.n:
                return answer["result"]

    def value(self, expression):
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")


def train(stapo, run):
    settings = [part for setting in SETTINGS for part in ("--set", setting)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run([stapo, "train", "--out", str(run), *settings], check=True, **quiet)
    return run


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stapo", default="target/release/stapo")
    parser.add_argument("--run", type=Path)
    parser.add_argument("--out", default="docs/images/serve.png")
    arguments = parser.parse_args()
    stapo = str(Path(arguments.stapo).resolve())
    with tempfile.TemporaryDirectory() as folder:
        run = arguments.run or train(stapo, Path(folder, "runs", "arithmetic"))
        serve = [stapo, "serve", str(run.parent), "--port", "0"]
        server = subprocess.Popen(serve, stdout=subprocess.PIPE, text=True)
        address = "http://" + server.stdout.readline().split("http://")[1].strip()
        browser = Browser(tempfile.mkdtemp(dir=folder))
        browser.call("Emulation.setDeviceMetricsOverride", deviceScaleFactor=1, mobile=False, **SIZE)
        browser.call("Page.navigate", url=f"{address}#/run?run={run.name}")
        while not browser.value("document.querySelectorAll('.curve').length > 8"):
            time.sleep(0.1)
        time.sleep(0.5)
        picture = base64.b64decode(browser.call("Page.captureScreenshot", format="png")["data"])
        Path(arguments.out).write_bytes(picture)
        print(f"{arguments.out}: {len(picture)} bytes")
        for process in (browser.process, server):
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
