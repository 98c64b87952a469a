"""Makes tests/data/chat/rendered.json: conversations in the templates beside it, as `transformers` renders them.

    pip install transformers jinja2
    python make_chat.py

The templates are written in the style of published ones. The clock of `transformers` is stopped at the date that the
cases give as `today`.
"""

import datetime
import json
import pathlib

from transformers.utils import chat_template_utils

FOLDER = pathlib.Path(__file__).parent.parent / "data" / "chat"
TODAY = "2026-11-08"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
CONVERSATIONS = [
    [("user", "How many?")],
    [("system", "Be brief.  "), ("user", "1+1?"), ("assistant", "\n2 \n"), ("user", " and 2+2? ")],
    [("system", "Count. /no_think"), ("user", "a"), ("assistant", "<think>\nhm\n</think>\n\nb"), ("tool", '{"x": 1}')],
    [("system", "/think Count.\n"), ("user", "é 😀"), ("assistant", "b")],
    [("system", "Only this. /system_override"), ("user", "a"), ("environment", "b")],
]
VARIABLES = [{}, {"enable_thinking": False, "thinking": True}, {"controls": {"length": "long"}, "reasoning_effort": "low"}]


class StoppedClock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromisoformat(TODAY)


def rendered(template, messages, prompt, variables):
    try:
        [text], _ = chat_template_utils.render_jinja_template(
            [messages], chat_template=template, add_generation_prompt=prompt, **TOKENS, **variables
        )
        return {"text": text}
    except Exception as refusal:
        return {"refused": str(refusal)}


def main():
    chat_template_utils.datetime = StoppedClock
    cases = []
    for path in sorted(FOLDER.glob("*.jinja")):
        for index, turns in enumerate(CONVERSATIONS):
            messages = [{"role": role, "content": content} for role, content in turns]
            for variables in VARIABLES:
                result = rendered(path.read_text(), messages, index != 3, variables)
                case = {"template": path.stem, "messages": messages, "prompt": index != 3, "variables": variables}
                cases.append(case | result)
    golden = {"today": TODAY, "special_tokens": TOKENS, "cases": cases}
    (FOLDER / "rendered.json").write_text(json.dumps(golden, ensure_ascii=False, separators=(",", ":")) + "\n")
    print(len(cases), "cases")


main()
