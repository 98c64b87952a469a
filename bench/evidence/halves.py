"""halves.py TRAIN FOLDER: splits GSM8K's training set in two: every even row becomes a conversation whose answer is the
human solution without its calculator notes and with the final answer in a box, for fine-tuning; odd rows stay problems."""
import json, re, sys
rows = [json.loads(line) for line in open(sys.argv[1])]
ask = "\nReason briefly, then give the final answer as \\boxed{answer}."
with open(sys.argv[2] + "/gsm8k-even-human.jsonl", "w") as talks, open(sys.argv[2] + "/gsm8k-odd.jsonl", "w") as problems:
    for place, row in enumerate(rows):
        if place % 2:
            problems.write(json.dumps({key: row[key] for key in ("id", "problem", "answer")}) + "\n")
            continue
        solution = re.sub(r"<<.*?>>", "", row["solution"]).strip() + f"\n\\boxed{{{row['answer']}}}"
        talks.write(json.dumps({"messages": [{"role": "user", "content": row["problem"] + ask}, {"role": "assistant", "content": solution}]}) + "\n")
