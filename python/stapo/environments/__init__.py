"""Environments of other packages for `stapo train`.

Each module is a program that writes the rows of a task and a file that holds the class `Environment`:

    python -m stapo.environments.textarena_env GuessTheNumber-v0 --size 1000 > rows.jsonl

    [task]
    path = "rows.jsonl"
    [environment]
    kind = "python"
    file = "site-packages/stapo/environments/textarena_env.py"
"""
