"""Writes the parity tables of dev/objectives.md: `stapo objective` beside TRL and verl on random mini-batches in f64.

    pip install torch trl verl ray orjson
    cargo build
    python bench/objective/parity.py target/debug/stapo

Every case of the golden scripts runs on ROUNDS mini-batches of its own. The error is the largest |ours - theirs| of a
token's d loss / d logp, as a share of the largest |theirs|, both over all of these. The first column has the error with
the preset as it is, the second with the settings that the case names.
"""

import json
import pathlib
import subprocess
import sys

import torch

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "crates/stapo-core/tests/goldens"))
import make_trl  # noqa: E402
import make_verl  # noqa: E402

ROUNDS = 20
DOCUMENT = ROOT / "dev/objectives.md"


def lines(case):
    """The mini-batch of a case as `stapo objective` reads it."""
    groups = [(group, reward) for group, members in enumerate(case["rewards"]) for reward in members]
    for i, (group, reward) in enumerate(groups):
        line = {"group": group, "reward": reward}
        for column in ("logp", "behavior_logp", "reference_logp", "sampler_logp", "entropy"):
            if column in case:
                line[column] = case[column][i]
        yield json.dumps(line)


def error(stapo, case, overrides):
    """The largest |ours - theirs| of a token's derivative."""
    command = [stapo, "objective", "--spec", case["preset"], "-"]
    if "weights" in case:
        command += ["--reward-weights", ",".join(map(str, case["weights"]))]
    for text in overrides:
        command += ["--set", text]
    run = subprocess.run(command, input="\n".join(lines(case)), capture_output=True, text=True)
    if run.returncode != 0:
        raise SystemExit(f"{case['name']}: {run.stderr}")
    ours = [json.loads(line)["d_logp"] for line in run.stdout.splitlines()[:-1]]
    return max(abs(a - b) for mine, theirs in zip(ours, case["d_logp"]) for a, b in zip(mine, theirs))


def table(stapo, cases):
    rounds = []
    for seed in range(1, ROUNDS + 1):
        torch.manual_seed(seed)
        rounds.append(cases())
    rows = ["| case | error, preset | error | settings that make them agree |", "|---|---|---|---|"]
    for own in zip(*rounds):
        largest = max(abs(x) for case in own for row in case["d_logp"] for x in row)
        plain = max(error(stapo, case, []) for case in own) / largest
        agreed = max(error(stapo, case, case["set"]) for case in own) / largest
        settings = " ".join(f"`{text}`" for text in own[0]["set"]) or "none"
        rows.append(f"| {own[0]['name']} (`{own[0]['preset']}`) | {plain:.0e} | {agreed:.0e} | {settings} |")
        print(rows[-1], flush=True)
    return "\n".join(rows)


def replace(text, name, body):
    start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, rest = text.split(start)
    return before + start + body + "\n" + end + rest.split(end)[1]


if __name__ == "__main__":
    text = DOCUMENT.read_text()
    for name, cases in (("trl", make_trl.cases), ("verl", make_verl.cases)):
        text = replace(text, name, table(sys.argv[1], cases))
    DOCUMENT.write_text(text)
