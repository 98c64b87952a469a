"""Writes reward_model_curve.json: loss, accuracy and gradient norm of every step of TRL's own RewardTrainer.

    stapo export builtin --out MODEL
    pip install torch trl
    python make_reward_model_curve.py MODEL reward_model_curve.json

Every step takes all rows, so that the order of rows does not matter. The new head is a formula, which the test that trains
beside this curve writes too.
"""

import json
import random
import sys
import tempfile

import numpy
import torch
import trl
from datasets import Dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer

STEPS = 8


def pairs():
    random.seed(1)
    for _ in range(16):
        a, b = random.randint(1, 60), random.randint(1, 60)
        wrong = a + b + random.choice([-10, -1, 1, 10])
        yield {"prompt": f"{a}+{b}=", "chosen": f"{a + b}", "rejected": f"{wrong}"}


rows = list(pairs())
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
tokenizer.pad_token = tokenizer.eos_token
model = AutoModelForSequenceClassification.from_pretrained(sys.argv[1], num_labels=1, dtype=torch.float32)
model.config.pad_token_id = tokenizer.pad_token_id
head = (0.05 * numpy.sin(numpy.arange(model.score.weight.numel()))).astype(numpy.float32)
model.score.weight.data = torch.from_numpy(head).reshape(1, -1)
settings = trl.RewardConfig(
    output_dir=tempfile.mkdtemp(), per_device_train_batch_size=len(rows), max_steps=STEPS, learning_rate=1e-4,
    lr_scheduler_type="constant", warmup_steps=0, weight_decay=0.0, adam_beta1=0.9, adam_beta2=0.95, adam_epsilon=1e-8,
    max_grad_norm=1.0, logging_steps=1, report_to=[], save_strategy="no", use_cpu=True, bf16=False, fp16=False,
    max_length=None, gradient_checkpointing=False, center_rewards_coefficient=0.01,
)
trainer = trl.RewardTrainer(
    model=model, args=settings, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
)
trainer.train()
steps = [
    {"loss": entry["loss"], "gradient_norm": entry["grad_norm"], "accuracy": entry["accuracy"]}
    for entry in trainer.state.log_history if "loss" in entry
]
curve = {"trl": trl.__version__, "torch": torch.__version__, "rows": rows, "steps": steps}
with open(sys.argv[2], "w") as file:
    file.write(json.dumps(curve) + "\n")
