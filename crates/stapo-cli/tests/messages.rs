//! What the program says when it refuses: the thing, the value and what to do instead.

use crate::common::{complaint, ok, stapo};
use std::fs;
use tempfile::TempDir;

#[test]
fn a_flag_that_cannot_have_its_effect_is_refused_by_name() {
    let folder = TempDir::new().unwrap();
    let at = folder.path();
    fs::create_dir_all(at.join("empty")).unwrap();
    fs::create_dir_all(at.join("adapter")).unwrap();
    let adapter = "{\"base_model_name_or_path\": \"Qwen/Qwen3-0.6B\"}";
    fs::write(at.join("adapter/adapter_config.json"), adapter).unwrap();
    fs::write(at.join("rows.jsonl"), "{\"q\": \"1+1=\", \"a\": \"2\"}\n").unwrap();
    let cases: [(&str, &str); 34] = [
        ("eval --max-tokens 0", "--max-tokens"),
        ("eval --template hello", "--template \"hello\": shows no problem"),
        ("eval --resume E --limit 3", "--limit"),
        ("eval --resume E --model builtin", "--model"),
        ("eval --verifier boxed-exac", "did you mean `boxed-exact`? the modes are math, boxed-exact"),
        ("eval --model models/none", "model models/none: no such file or folder\nhint: a model is "),
        ("eval --model empty/none", "model empty/none: no such file or folder"),
        ("train qwen3-1.7b", "likely Qwen/Qwen3-1.7B-Base: --model Qwen/Qwen3-1.7B-Base --fetch"),
        (
            "eval --model adapter",
            "whose base model is Qwen/Qwen3-0.6B\nhint: --model Qwen/Qwen3-0.6B --adapter",
        ),
        ("plan --device cpu --machine h200", "cannot be used with"),
        ("eval --adapter nothere", "stapo export RUN --out DIR"),
        (
            "eval --benchmarks rows.jsonl",
            "task.problem_field, or --problem-field of stapo init; stapo eval knows",
        ),
        ("score --model builtin --input - --temperature 0", "0 is not from 1e-6 to 1e6\n"),
        (
            "generate --model builtin --prompt 1+1= --chat-arguments {\"a\":1}",
            "--chat-arguments: has no effect",
        ),
        ("report empty --png pictures --figure entropy", "--figure entropy: has no effect"),
        ("experiment main --jobs 0", "--jobs"),
        ("counterfactual empty --gradient --problems 0", "--problems"),
        ("problems -n 0", "-n <N>"),
        ("config", "hint: --schema prints the keys"),
        ("verify-run runs/a --steps 2", "hint: stapo verify runs/a --steps 2 --replay"),
        ("launch --ranks 2 verify runs/a", "launch verify: several processes replay steps"),
        ("verify empty --rank 1 --world 2", "--rank: given without --replay"),
        ("launch train", "<--gpus <N>|--ranks <N>>"),
        ("export builtin --step 3 --out x", "--step: builtin is no run folder"),
        ("export runs/a@best --step 1 --out x", "RUN@STEP names its step already"),
        ("sft grpo", "hint: name a TOML file, or give --model MODEL --data FILE"),
        ("pretrain base", "hint: name a TOML file; without one, stapo pretrain makes the built-in model"),
        ("sft", "--data: absent"),
        ("verify nothere", "nothere: no such folder\nhint: name the folder of a run"),
        ("verify empty", "empty: holds no run, no evaluation and no experiment\nhint: "),
        (
            "train --set task.verifier={kind=\"command\",program=\"nothere\"}",
            "verifier nothere, program of the verifier: no such program\nhint: verifier.program: ",
        ),
        ("train --set task.held_out_share=1", "config.task.held_out_share: 1 leaves no problem to train on"),
        (
            "plan --no-measure --set update.reus.max=4",
            "--set update.reus.max=4: config.update.reus: unknown key",
        ),
        (
            "plan --no-measure --set rollout.lengths.mean=4",
            "--set rollout.lengths.mean=4: config.rollout.lengths",
        ),
    ];
    for (words, expected) in cases {
        let said = complaint(at, &words.split(' ').collect::<Vec<_>>());
        assert!(said.contains(expected), "{words}: {said}");
    }
    assert!(!at.join("runs").exists() && !at.join("evals").exists(), "a refusal leaves no folder");
}

#[test]
fn a_file_for_another_command_is_told_as_that() {
    let folder = TempDir::new().unwrap();
    let at = folder.path();
    fs::write(at.join("sft.toml"), "steps = 3\n\n[data]\npath = \"rows.jsonl\"\n").unwrap();
    fs::write(at.join("rl.toml"), "steps = 3\n\n[rollout]\ngroup_size = 4\n").unwrap();
    fs::write(at.join("arms.toml"), "name = \"a\"\nseeds = [0]\n\n[[arms]]\nname = \"grpo\"\n").unwrap();
    let cases = [
        (
            "train sft.toml",
            "sft.toml:3",
            "config.data: a key of files for stapo sft, stapo prefer, stapo rm and stapo pretrain\nhint: this command reads files for stapo train; give this one to stapo sft, stapo prefer, stapo rm or stapo pretrain",
        ),
        ("plan arms.toml", "arms.toml:", "config.arms: a key of files for stapo experiment"),
        ("sft rl.toml", "rl.toml", "config.rollout: a key of files for stapo train"),
        ("pretrain arms.toml", "arms.toml", "config.arms: a key of files for stapo experiment"),
        ("experiment rl.toml", "rl.toml", "experiment.rollout: a key of files for stapo train"),
        (
            "experiment sft.toml",
            "sft.toml",
            "experiment.data: a key of files for stapo sft, stapo prefer, stapo rm and stapo pretrain",
        ),
    ];
    for (words, place, expected) in cases {
        let said = complaint(at, &words.split(' ').collect::<Vec<_>>());
        assert!(said.contains(place) && said.contains(expected), "{words}: {said}");
    }
    // A file with keys of its own kind has a stray one, which is told by its name.
    fs::write(at.join("both.toml"), "[rollout]\ngroup_size = 4\n\n[data]\npath = \"rows.jsonl\"\n").unwrap();
    assert!(complaint(at, &["train", "both.toml"]).contains("unknown key `data`"));
}

#[test]
fn supervised_runs_are_listed_and_told_from_training_runs() {
    let folder = TempDir::new().unwrap();
    let at = folder.path();
    let rows = (1..5).map(|n| format!("{{\"prompt\": \"{n}+{n}=\", \"response\": \"{}\"}}\n", 2 * n));
    fs::write(at.join("rows.jsonl"), rows.collect::<String>()).unwrap();
    // The model is the built-in one, and the last step is shown although it is not the tenth.
    let sft = "sft --data rows.jsonl --set steps=2 --out runs/sft";
    let made = stapo(at, &sft.split(' ').collect::<Vec<_>>());
    ok(&made);
    let said = String::from_utf8_lossy(&made.stderr).into_owned();
    assert!(said.contains("step     2/2  loss "), "{said}");
    let listed = ok(&stapo(at, &["runs"]));
    assert!(listed.lines().any(|line| line.contains("2/2") && line.ends_with("sft, done")), "{listed}");
    let small = "train --set steps=1 --set rollout.problems_per_step=1 --set rollout.group_size=2 --set \
        update.problems_per_minibatch=1 --set evaluation.problems=1 --set canaries.enabled=false --out runs/rl";
    ok(&stapo(at, &small.split_whitespace().collect::<Vec<_>>()));
    for words in [
        "train --resume runs/sft",
        "inspect runs/sft",
        "compare runs/sft runs/rl",
        "counterfactual runs/sft",
        "problems runs/sft",
        "report runs/sft",
    ] {
        let said = complaint(at, &words.split(' ').collect::<Vec<_>>());
        let expected = "runs/sft: was written by stapo sft, prefer or pretrain; this command reads runs of stapo train\nhint: ";
        assert!(said.contains(expected), "{words}: {said}");
    }
    // Plans of supervised runs are simulated.
    ok(&stapo(at, &["plan", "runs/sft"]));
    let said = complaint(at, &["sft", "--resume", "runs/rl"]);
    assert!(said.contains("runs/rl: was written by stapo train; this command reads"), "{said}");
    assert!(said.contains("stapo train --resume runs/rl continues it"), "{said}");
    let said = complaint(at, &["generate", "--model", "builtin", "--adapter", "runs/rl", "--prompt", "1+1="]);
    assert!(
        said.contains("export the run first (stapo export runs/rl --out DIR), or use --model runs/rl"),
        "{said}"
    );
    let long = "sft --data rows.jsonl --set data.long_rows=drop --set update.microbatch_tokens=2 --out x";
    let said = complaint(at, &long.split(' ').collect::<Vec<_>>());
    assert!(said.contains("4 of 4 rows") && !said.contains("long_rows=drop"), "{said}");
}
