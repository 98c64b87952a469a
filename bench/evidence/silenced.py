"""silenced.py RUN ... [--control RUN ...] [--effects FILE ...] [--examples N]: which tokens S2T silenced.

RUN is a run folder; --control names runs with a random mask, whose silenced tokens are a sample of all tokens. The script reads
`tokens/` and `explored/`, and `rollouts/` where `tokens/` is missing. It prints tables by part of speech (or category of a
program), position, preferred token and group, and N examples drawn evenly over the steps. --effects are files that
`stapo counterfactual --out` wrote; their differences are shown by group. Standard library only."""
import argparse
import glob
import json
import math
import re
from collections import Counter, defaultdict

FUNCTION_WORDS = set(
    "a an the this that these those each every all both some any no another other such i you he she it we they him her them us me his its "
    "their our your my who which what there here of in on at by for from with to into per after before over under about than as between "
    "without within during through and or but if so because since when while then where how why not is are was were be been being am has "
    "have had do does did will would can could should may might must let's let us it's he's she's there's don't didn't".split()
)
FLOW_WORDS = set(
    "first firstly second secondly third thirdly next then now finally lastly therefore thus hence so since because given also again "
    "however initially step steps let's let after afterwards similarly subsequently later".split()
)
ACTIONS = set(
    "calculate find determine compute solve add subtract multiply divide get know need start have total equals equal use convert sum give "
    "see simplify evaluate apply denote set write assume say work buy sell spend earn pay make take left cost costs".split()
)
PROGRAM = ("identifier", "keyword", "literal", "operator", "comment", "whitespace", "prose")
PROSE = ("word of flow", "function word", "verb of calculation", "other word", "part of a word", "number", "operator or punctuation",
         "LaTeX or markdown", "line break or blank", "end of the response")


def part_of_speech(text, before, after):
    """The kind of a token in prose with formulas, by its text and the characters around it."""
    word = text.strip()
    if word.startswith("<|") or word in ("</s>", "<end_of_turn>"):
        return "end of the response"
    if not word:
        return "line break or blank"
    if word[0] == "\\" or all(c in "{}$#&_~`|*" for c in word) and word not in ("*", "**"):
        return "LaTeX or markdown"
    if re.search(r"\\\w*$", before) and not text[0].isspace() and word.isalpha():
        return "LaTeX or markdown"
    if all(c.isdigit() or c in ".,%" for c in word) and any(c.isdigit() for c in word):
        return "number"
    if not any(c.isalpha() for c in word):
        return "operator or punctuation"
    letters = word.strip(".,:;!?()[]{}'\"*-").lower()
    continues = not text[0].isspace() and before[-1:].isalpha()
    if continues or (text == text.rstrip() and text[-1:].isalpha() and after[:1].isalpha()):
        return "part of a word"
    if letters in FLOW_WORDS:
        return "word of flow"
    if letters in FUNCTION_WORDS:
        return "function word"
    return "verb of calculation" if letters in ACTIONS else "other word"


def position(token_idx, before):
    """Where a token stands, by its index and the text before it."""
    if token_idx < 5:
        return "first five tokens"
    if re.search(r"\\boxed\{[^}]*$", before):
        return "within the box"
    if re.search(r"(^|[.:!?]\s*|\n\s*|\d\.\s|[-*#]\s)$", before):
        return "start of a sentence or line"
    return "within a sentence"


POSITIONS = ("first five tokens", "start of a sentence or line", "within a sentence", "within the box")


def preference(text, preferred, before="", after=""):
    """How the sampled token relates to the one that the policy preferred."""
    if preferred is None:
        return "unknown"
    plain = lambda t: t.strip().strip(".,:;").lower()
    if text.strip() and text.strip() == preferred.strip() or plain(text) and plain(text) == plain(preferred):
        return "same word, other case, space or punctuation"
    kind, other = part_of_speech(text, before, after), part_of_speech(preferred, before, "")
    one, two = plain(text), plain(preferred)
    if one and two and one.isalpha() and two.isalpha() and (one.startswith(two) or two.startswith(one)):
        return "a form or a part of the same word"
    if "number" in (kind, other):
        return "another number" if kind == other else "a number for something else, or the reverse"
    if "end of the response" in (kind, other):
        return "ends for goes on, or the reverse"
    words = {"word of flow", "function word", "verb of calculation", "other word", "part of a word"}
    if kind in words and other in words:
        return "another word"
    if kind not in words and other not in words:
        return "another sign or break"
    return "a word for a sign or break, or the reverse"


PREFERENCES = ("same word, other case, space or punctuation", "a form or a part of the same word", "another word", "another number",
               "a number for something else, or the reverse", "another sign or break", "a word for a sign or break, or the reverse",
               "ends for goes on, or the reverse", "unknown")


def n_right(advantage, group_size=8):
    """Right responses of a group whose right ones have this advantage: (reward - mean) / standard deviation, rewards of two values."""
    for right in range(1, group_size):
        wrong = group_size - right
        for divisor in (group_size - 1, group_size):
            if abs(advantage - math.sqrt(wrong * divisor / (group_size * right))) < 1e-3 * advantage:
                return right
    return None


def lines(pattern):
    for path in sorted(glob.glob(pattern)):
        with open(path, encoding="utf-8") as file:
            yield from map(json.loads, file)


def from_response(record):
    """The silenced tokens and the kept candidates of one recorded response, as lines of `tokens/` have them."""
    tokens, end = record["tokens"], 0
    for idx, text in enumerate(tokens["text"]):
        start, end = end, end + len(text)
        mask = tokens["silenced_by"][idx]
        if mask or tokens["is_candidate"][idx]:
            yield {**{key: record[key] for key in ("step", "problem_id", "sample_idx", "advantage")}, "token_idx": idx, "text": text,
                   "silenced_by": mask, "logp": tokens["logp"][idx], "entropy": tokens["entropy"][idx],
                   "context_before": "".join(tokens["text"][max(0, idx - 12):idx]), "context_after": "".join(tokens["text"][idx + 1:idx + 13]),
                   "alternatives": (tokens["alternatives"] or [[]] * (idx + 1))[idx], "category": category(record, start, end)}


def category(record, start, end):
    """The kind of source text that characters of a response are, by a small lexer of Python; None where there is no program."""
    source = record.get("program", {}).get("source", "")
    if "program" not in record:
        return None
    first = record["text"].rfind(source) if source else -1
    if not source or first < 0 or not first <= start < first + len(source):
        return "prose"
    keywords = "False|None|True|and|as|assert|async|await|break|class|continue|def|del|elif|else|except|finally|for|from|global|if|import|in|is|" \
               "lambda|nonlocal|not|or|pass|raise|return|try|while|with|yield"
    rules = (("comment", r"#[^\n]*"), ("literal", r"(?s:[rbfuRBFU]{0,2}(?:\"\"\".*?\"\"\"|'''.*?'''|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'))|\d[\w.]*"),
             ("keyword", rf"(?:{keywords})\b"), ("identifier", r"\w+"), ("whitespace", r"\s+"), ("operator", r"."))
    lexer = re.compile("|".join(f"(?P<{name}>{rule})" for name, rule in rules))
    found = [m.lastgroup for m in lexer.finditer(source) if m.end() > start - first and m.start() < end - first]
    return next((name for name in found if name != "whitespace"), "whitespace")


def read(run):
    """Silenced tokens and kept candidates of a run."""
    tokens = [*lines(f"{run}/tokens/*.jsonl"), *lines(f"{run}/explored/*.jsonl")]
    return tokens or [token for record in lines(f"{run}/rollouts/*.jsonl") for token in from_response(record)]


def distinct(tokens):
    """Each token once: runs of one seed share their first step, and repeated runs all of them."""
    keys = ("step", "problem_id", "sample_idx", "token_idx", "text", "logp")
    return list({tuple(token[key] for key in keys): token for token in tokens}.values())


def interval(k, n):
    """Wilson's 95 % interval of a share, in percent."""
    z, p = 1.96, k / n
    middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, 100 * (middle - half) / (1 + z * z / n)), 100 * (middle + half) / (1 + z * z / n)


def table(title, key, names, silenced, control):
    print(f"\n| {title} | silenced | share, % [95 %] | " + ("control | share, % | " if control else "") + "most frequent |")
    print("|---|---|---|" + ("---|---|" if control else "") + "---|")
    counts, others = Counter(map(key, silenced)), Counter(map(key, control))
    for name in names:
        n = counts[name]
        if not n and not others[name]:
            continue
        low, high = interval(n, len(silenced))
        texts = Counter(token["text"] for token in silenced if key(token) == name).most_common(5)
        shown = ", ".join(f"`{json.dumps(text, ensure_ascii=False)[1:-1]}`" + (f" {k}" if k > 1 else "") for text, k in texts)
        control_cells = f"{others[name]} | {100 * others[name] / len(control):.1f} | " if control else ""
        print(f"| {name} | {n} | {100 * n / len(silenced):.1f} [{low:.1f}, {high:.1f}] | {control_cells}{shown} |")


def preferred(token):
    return token["alternatives"][0]["text"] if token.get("alternatives") else None


def kind(token):
    return token.get("category") or part_of_speech(token["text"], token["context_before"], token["context_after"])


def groups(tokens, control):
    """Whether the fate of a candidate depends on how many responses of its group are right."""
    print("\n| right of 8 in the group | candidates | silenced | share silenced, % [95 %] | rewarded tokens of the control, % |\n|---|---|---|---|---|")
    by, others = defaultdict(list), Counter(n_right(token["advantage"]) for token in control if token["advantage"] > 0)
    for token in tokens:
        by[n_right(token["advantage"])].append(bool(token.get("silenced_by")))
    for right in sorted((n for n in by if n), key=int):
        fates = by[right]
        low, high = interval(sum(fates), len(fates))
        control_share = f"{100 * others[right] / sum(others.values()):.1f}" if others else ""
        print(f"| {right} | {len(fates)} | {sum(fates)} | {100 * sum(fates) / len(fates):.1f} [{low:.1f}, {high:.1f}] | {control_share} |")


def rates(runs):
    """Candidates and silenced tokens per 10,000 tokens of rewarded responses, over the groups that `rollouts/` has as a whole."""
    whole = defaultdict(lambda: [0, 0, 0])
    for run in runs:
        groups = defaultdict(list)
        for record in lines(f"{run}/rollouts/*.jsonl"):
            groups[record["step"], record.get("group_idx", record["problem_id"])].append(record)
        for group in groups.values():
            right = [record for record in group if record["advantage"] > 0]
            if len({record["sample_idx"] for record in group}) == 8 and right:
                for record in right:
                    cell = whole[len(right)]
                    cell[0] += len(record["tokens"]["id"])
                    cell[1] += sum(record["tokens"]["is_candidate"])
                    cell[2] += sum(map(bool, record["tokens"]["silenced_by"]))
    if whole:
        print("\n| right of 8 | rewarded tokens | candidates per 10,000 | silenced per 10,000 |\n|---|---|---|---|")
    for right, (n, candidates, silenced) in sorted(whole.items()):
        print(f"| {right} | {n} | {1e4 * candidates / n:.1f} | {1e4 * silenced / n:.1f} |")


def effects(files):
    """Right answers after the token as sampled less those after the preferred one, by group; problems are the unit of chance."""
    rows = [row for path in files for row in lines(path) if row["advantage"] > 0]
    print("\n| token | right of 8 | tokens | difference, points [95 %] |\n|---|---|---|---|")
    for name in ("silenced", "kept_candidate", "random"):
        for label, wanted in (("1 to 3", (1, 2, 3)), ("4 and 5", (4, 5)), ("6 and 7", (6, 7))):
            problems = defaultdict(list)
            for row in rows:
                if row["kind"] == name and n_right(row["advantage"]) in wanted:
                    difference = (row["n_right_sampled"] - row["n_right_preferred"]) / row["n_samples"]
                    problems[row["step"], row["problem_id"]].append(100 * difference)
            means = [sum(values) / len(values) for values in problems.values()]
            if len(means) > 2:
                mean = sum(means) / len(means)
                half = 2.0 * math.sqrt(sum((v - mean) ** 2 for v in means) / (len(means) - 1) / len(means))
                print(f"| {name} | {label} | {sum(map(len, problems.values()))} | {mean:+.1f} [{mean - half:+.1f}, {mean + half:+.1f}] |")


def examples(silenced, n):
    picked = silenced if len(silenced) <= n else [silenced[int(i * len(silenced) / n)] for i in range(n)]
    one_line = lambda text: json.dumps(text, ensure_ascii=False)[1:-1]
    print(f"\n{len(picked)} examples: step, probability, entropy, right of 8; text before [sampled | preferred] text after")
    for token in picked:
        print(f"{token['step']:4d} {math.exp(token['logp']):.1e} {token['entropy']:.2f} {n_right(token['advantage']) or '?'}/8 {kind(token):18s} "
              f"…{one_line(token['context_before'][-60:])}[{one_line(token['text'])} | {one_line(preferred(token) or '?')}]{one_line(token['context_after'][:40])}…")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--control", nargs="*", default=[])
    parser.add_argument("--effects", nargs="*", default=[])
    parser.add_argument("--examples", type=int, default=50)
    args = parser.parse_args()
    tokens = distinct(token for run in args.runs for token in read(run))
    silenced = [token for token in tokens if token.get("silenced_by")]
    control = distinct(token for run in args.control for token in read(run) if token.get("silenced_by"))
    if not silenced:
        raise SystemExit(f"{', '.join(args.runs)}: no silenced token recorded\nhint: record.responses and the mask of the objective decide")
    print(f"{len(silenced)} silenced tokens and {len(tokens) - len(silenced)} kept candidates; control {len(control)}")
    table("what the token is", kind, PROGRAM if silenced[0].get("category") else PROSE, silenced, control)
    table("position", lambda token: position(token["token_idx"], token["context_before"]), POSITIONS, silenced, control)
    relation = lambda token: preference(token["text"], preferred(token), token["context_before"], token["context_after"])
    table("instead of the preferred token", relation, PREFERENCES, silenced, [])
    groups(tokens, control)
    rates(args.runs)
    if args.effects:
        effects(args.effects)
    examples(sorted(silenced, key=lambda token: (token["step"], token["problem_id"])), args.examples)


if __name__ == "__main__":
    main()
