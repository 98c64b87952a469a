"""Games of `textarena` for one player.

    python -m stapo.environments.textarena_env GuessTheNumber-v0 --size 1000 --seed 0 > rows.jsonl
"""

import argparse
import json
import random
import sys

import textarena


class Game:
    """A game with its own randomness: games draw from Python's generator, which all games of a process share."""

    def __init__(self, name, seed):
        self.randomness = random.Random(seed).getstate()
        # The form without wrappers gives each observation once instead of the whole history.
        self.game = textarena.make(f"{name}-raw")
        self.drawing(lambda: self.game.reset(num_players=1))

    def drawing(self, play):
        """Runs a part of the game on the game's randomness."""
        shared = random.getstate()
        random.setstate(self.randomness)
        try:
            return play()
        finally:
            self.randomness = random.getstate()
            random.setstate(shared)

    def news(self):
        """What the game has said since the last turn; what the player wrote is left out."""
        _, observations = self.game.get_observation()
        own = textarena.ObservationType.PLAYER_ACTION
        return "\n".join(message for _, message, kind in observations if kind != own)

    def step(self, message):
        """Plays a turn; returns whether the game has ended."""
        return self.drawing(lambda: self.game.step(message))[0]


def rows(game, size, seed):
    """The rows of a data file: games that differ in their seeds. A prompt is what a game says first."""
    for number in range(seed, seed + size):
        prompt = Game(game, number).news()
        yield {"id": f"{game}-{number}", "prompt": prompt, "answer": "", "game": game, "seed": number}


class Environment:
    """A game. Its reward comes at the end, and a reward above 0 is right."""

    def reset(self, row):
        """Starts the game of a row."""
        self.game = Game(row["game"], row["seed"])
        self.game.news()

    def step(self, message):
        """Plays one turn."""
        if not self.game.step(message):
            return self.game.news()
        rewards, about = self.game.game.close()
        reward, reason = float(rewards[0]), str(about[0].get("reason", "the game ended"))
        return {"reward": reward, "done": True, "verdict": reward > 0.0, "reason": reason}


def main():
    """Writes the rows of one game."""
    parser = argparse.ArgumentParser(description=rows.__doc__)
    parser.add_argument("game")
    parser.add_argument("--size", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for row in rows(given.game, given.size, given.seed):
        sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
