"""Servers of `OpenEnv`, by the client of `openenv-core`.

    python -m stapo.environments.openenv_env http://127.0.0.1:8000 --action message --observation text --size 100 > rows.jsonl

`action` names the field of an action that takes the policy's message, `observation` the field that the policy reads; without
it, the policy reads the whole observation as JSON. The environment needs the network: `network = true` in its table.
"""

import argparse
import json
import sys

from openenv.core import GenericEnvClient


def text_of(observation, field):
    """What the policy reads of an observation."""
    if not field:
        return json.dumps(observation, sort_keys=True)
    if field not in observation:
        raise KeyError(f"the observation has no field {field!r}; it has {sorted(observation)}")
    return str(observation[field])


def connect(url):
    """A client of a server."""
    client = GenericEnvClient(base_url=url).sync()
    client.connect()
    return client


def rows(url, action, observation, size, seed):
    """The rows of a data file: episodes that differ in their seeds. A prompt is what the server says first."""
    client = connect(url)
    try:
        for number in range(seed, seed + size):
            prompt = text_of(client.reset(seed=number).observation, observation)
            origin = {"url": url, "action": action, "observation": observation, "seed": number}
            yield {"id": f"openenv-{number}", "prompt": prompt, "answer": "", **origin}
    finally:
        client.close()


class Environment:
    """An episode on a server. The reward of the last step decides, and a reward above 0 is right."""

    def reset(self, row):
        """Starts the episode of a row."""
        self.row = row
        self.client = connect(row["url"])
        self.client.reset(seed=row["seed"])

    def step(self, message):
        """Sends one action."""
        result = self.client.step({self.row["action"]: message})
        reward = float(result.reward or 0.0)
        if not result.done:
            return text_of(result.observation, self.row["observation"]), reward, False
        self.client.close()
        return {"reward": reward, "done": True, "verdict": reward > 0.0}


def main():
    """Writes the rows of one server."""
    parser = argparse.ArgumentParser(description=rows.__doc__)
    parser.add_argument("url")
    parser.add_argument("--action", default="message")
    parser.add_argument("--observation", default="")
    parser.add_argument("--size", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for row in rows(given.url, given.action, given.observation, given.size, given.seed):
        sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
