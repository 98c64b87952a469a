#!/usr/bin/env python3
"""A reward of your own: one line of JSON in, one line of JSON out, in the same order."""
import json
import re
import sys

for line in sys.stdin:
    sample = json.loads(line)
    boxes = re.findall(r"\\boxed\{([^{}]*)\}", sample["response"])
    is_right = bool(boxes) and boxes[-1].strip() == sample["reference"]
    # A right answer is worth 1, less a little for every word; a wrong one is worth nothing.
    n_words = len(sample["response"].split())
    reward = max(0.5, 1.0 - 0.02 * n_words) if is_right else 0.0
    verdict = "right" if is_right else "wrong" if boxes else "no_answer"
    answer = {"sample": sample["sample"], "verdict": verdict, "reward": reward}
    # Without flush the trainer would wait for an answer that lies in a buffer.
    print(json.dumps(answer), flush=True)
