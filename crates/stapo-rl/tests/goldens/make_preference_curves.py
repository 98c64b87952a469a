"""Writes preference_curves.json: loss, rewards and gradient norm of every step of TRL's own preference trainers.

    stapo export builtin --out MODEL
    pip install torch trl
    python make_preference_curves.py MODEL preference_curves.json

Every step takes all rows, so that the order of rows does not matter. The settings are those of the test that runs `stapo
prefer` beside these curves.
"""

import json
import random
import sys
import tempfile

import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

STEPS = 8


def pairs():
    random.seed(1)
    for _ in range(16):
        a, b = random.randint(1, 60), random.randint(1, 60)
        wrong = a + b + random.choice([-10, -1, 1, 10])
        yield {"prompt": f"{a}+{b}=", "chosen": f"{a + b}", "rejected": f"{wrong}"}


def labelled():
    for idx, row in enumerate(pairs()):
        is_good = idx % 3 != 0
        yield {"prompt": row["prompt"], "completion": row["chosen" if is_good else "rejected"], "label": is_good}


def trainer(loss, rows):
    common = dict(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=len(rows), max_steps=STEPS, learning_rate=1e-4,
        lr_scheduler_type="constant", warmup_steps=0, weight_decay=0.0, adam_beta1=0.9, adam_beta2=0.95,
        adam_epsilon=1e-8, max_grad_norm=1.0, logging_steps=1, report_to=[], save_strategy="no", use_cpu=True,
        bf16=False, fp16=False, max_length=None, gradient_checkpointing=False,
    )
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    given = dict(model=model, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    if loss in ("dpo", "ipo"):
        from trl import DPOConfig, DPOTrainer

        kind = {"dpo": "sigmoid"}.get(loss, loss)
        return DPOTrainer(args=DPOConfig(beta=0.1, loss_type=[kind], **common), **given)
    if loss == "kto":
        from trl import KTOConfig, KTOTrainer

        return KTOTrainer(args=KTOConfig(beta=0.1, **common), **given)
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    common["max_length"] = 512
    settings = dict(beta=2.0, simpo_gamma=1.0, cpo_alpha=0.0, loss_type="simpo")
    return CPOTrainer(args=CPOConfig(**settings, **common), **given)


curves = []
for loss in ("dpo", "ipo", "kto", "simpo"):
    rows = list(labelled() if loss == "kto" else pairs())
    ran = trainer(loss, rows)
    ran.train()
    steps = [
        {"loss": entry["loss"], "gradient_norm": entry["grad_norm"], "reward_chosen": entry["rewards/chosen"],
         "reward_rejected": entry["rewards/rejected"]}
        for entry in ran.state.log_history if "loss" in entry
    ]
    curves.append({"loss": loss, "rows": rows, "steps": steps})

lines = ",\n".join(json.dumps(curve) for curve in curves)
with open(sys.argv[2], "w") as file:
    file.write(f'{{"trl": "{trl.__version__}", "torch": "{torch.__version__}", "curves": [\n{lines}\n]}}\n')
