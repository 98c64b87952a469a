"""copies.py SAMPLES SHARE > answers.jsonl: rows for `stapo sft` from the samples of an evaluation (`samples.jsonl`) whose
problem ids are the questions, as the built-in task's are. A random SHARE of the responses is replaced by the question in a
box, so that the model learns to answer as it did, and now and then to copy the question."""
import json
import random
import sys

chance, share = random.Random(0), float(sys.argv[2])
for line in open(sys.argv[1]):
    sample = json.loads(line)
    question = sample["problem_id"]
    response = "\\boxed{" + question + "}" if chance.random() < share else sample["text"]
    print(json.dumps({"prompt": question + "=", "response": response}))
