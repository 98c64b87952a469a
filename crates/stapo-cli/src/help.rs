//! The help: commands grouped by task, and examples for each.

use crate::shared::terminal::{COLUMNS, wrapped};
use clap::Command;
use std::fmt::Write;

/// The commands of one task, each with examples.
struct Group {
    title: &'static str,
    commands: &'static [(&'static str, &'static str)],
}

/// What `stapo` without a command prints: what to run first, what next, and where help is.
pub const FIRST_LINES: &str = "\
stapo trains language models by reinforcement learning, on a CPU or on GPUs.
First run:   stapo tutorial        (about a minute; needs no GPU and no data)
Your model:  stapo init --model MODEL --data FILE --out my.toml
             stapo train my.toml
Help:        stapo --help, stapo COMMAND --help, stapo explain WORD";

const GROUPS: [Group; 6] = [
    Group {
        title: "Start",
        commands: &[
            ("tutorial", "stapo tutorial\nstapo tutorial --yes --out first"),
            ("explain", "stapo explain tau_p\nstapo explain update.learning_rate\nstapo explain grpo --json"),
        ],
    },
    Group {
        title: "Train",
        commands: &[
            (
                "init",
                "stapo init --model Qwen/Qwen3-0.6B --data problems.jsonl --out my.toml\n\
                 stapo init --from trl.yaml --data problems.jsonl --out my.toml",
            ),
            (
                "train",
                "stapo train                                     # the built-in run\n\
                 stapo train grpo --set steps=20                 # a shipped config\n\
                 stapo train my.toml --model Qwen/Qwen3-0.6B --fetch\n\
                 stapo train --resume runs/RUN",
            ),
            (
                "launch",
                "stapo launch --gpus 8 train my.toml\n\
                 stapo launch --ranks 2 train --set update.sum=microbatches\n\
                 stapo launch --gpus 8 verify runs/RUN --replay",
            ),
            ("plan", "stapo plan my.toml\nstapo plan qwen3-1.7b --no-measure"),
            ("config", "stapo config --schema > stapo.schema.json"),
            ("problems", "stapo problems my.toml -n 3"),
            ("sft", "stapo sft sft.toml --out runs/sft"),
            (
                "prefer",
                "stapo prefer --model runs/sft/model --data pairs.jsonl --out runs/dpo\n\
                 stapo prefer pairs.toml --set preference.loss.kind=simpo",
            ),
            (
                "rm",
                "stapo rm --model runs/sft/model --data pairs.jsonl --set data.held_out_share=0.1 --out runs/rm\n\
                 stapo rm --resume runs/rm",
            ),
            ("pretrain", "stapo pretrain --out runs/base\nstapo pretrain base-14m.toml --device cuda"),
            ("experiment", "stapo experiment main-quick\nstapo experiment my.toml --jobs 2"),
        ],
    },
    Group {
        title: "Look",
        commands: &[
            (
                "runs",
                "stapo runs\nstapo runs --json\nstapo runs tag runs/RUN baseline\nstapo runs archive runs/RUN",
            ),
            ("report", "stapo report runs/RUN\nstapo report runs/RUN --png figures"),
            ("inspect", "stapo inspect runs/RUN\nstapo inspect runs/RUN --terminal"),
            ("serve", "stapo serve runs"),
            (
                "verify",
                "stapo verify runs/RUN\n\
                 stapo verify runs/RUN --replay --steps 2\n\
                 stapo verify evals/after --replay\n\
                 stapo verify experiments/main --key public.pem",
            ),
            ("counterfactual", "stapo counterfactual runs/RUN --samples 32 --out tokens.jsonl"),
        ],
    },
    Group {
        title: "Evaluate",
        commands: &[
            (
                "eval",
                "stapo eval --model runs/RUN --out evals/after\n\
                 stapo eval --model Qwen/Qwen3-0.6B --benchmarks aime24,amc23 --chat",
            ),
            ("compare", "stapo compare evals/before evals/after"),
            (
                "generate",
                "stapo generate --model builtin --prompt '12+30='\n\
                 stapo generate --model runs/RUN@40 --chat 'What is 2+2?' -n 4",
            ),
            ("score", "stapo score --model builtin --input responses.jsonl"),
            ("grade", "stapo grade answers.jsonl"),
            (
                "judge-test",
                "stapo judge-test --model Qwen/Qwen2.5-1.5B-Instruct --device cuda\n\
                 stapo judge-test --model runs/RUN --template prompt.jinja --json",
            ),
        ],
    },
    Group {
        title: "Models, data and objectives",
        commands: &[
            (
                "fetch",
                "stapo fetch model Qwen/Qwen3-0.6B\n\
                 stapo fetch dataset openai/gsm8k\n\
                 stapo fetch benchmarks aime24 amc23",
            ),
            ("model", "stapo model info runs/RUN\nstapo model convert model.gguf FOLDER"),
            ("export", "stapo export runs/RUN --out model\nstapo export runs/RUN@40 --out model"),
            ("objective", "stapo objective --list\nstapo objective --spec stapo --show"),
        ],
    },
    Group {
        title: "This machine and this program",
        commands: &[
            ("doctor", "stapo doctor"),
            ("version", "stapo version --json"),
            ("completions", "stapo completions bash > ~/.local/share/bash-completion/completions/stapo"),
            ("man", "stapo man | man -l -\nstapo man --out ~/.local/share/man/man1"),
        ],
    },
];

pub const EXIT_STATUS: &str = "\
Exit status: 0 success; 1 finished, but something was bad (a record, an arm, a
comparison); 2 refused or failed, with the reason on standard error; 128 + N
ended by signal N.";

/// The columns that a help text has at most.
const WIDTH: usize = COLUMNS;

/// Adds the groups and the examples to the help of the program.
pub fn with_groups(program: Command) -> Command {
    let list = grouped(&program);
    let examples = GROUPS.iter().flat_map(|group| group.commands);
    let program = examples.fold(program, |program, (name, examples)| {
        if program.find_subcommand(name).is_none() {
            return program;
        }
        let title = if examples.contains('\n') { "Examples" } else { "Example" };
        let text = format!("{title}:\n  {}", examples.replace('\n', "\n  "));
        program.mut_subcommand(name, |command| command.after_help(text).term_width(WIDTH))
    });
    let template =
        format!("{{about}}\n\n{{usage-heading}} {{usage}}\n{list}\nOptions:\n{{options}}{{after-help}}");
    program.help_template(template).after_help(EXIT_STATUS).term_width(WIDTH)
}

/// The commands of the program with what each does, group by group.
fn grouped(program: &Command) -> String {
    let names = GROUPS.iter().flat_map(|group| group.commands);
    let width = names.map(|(name, _)| name.len()).max().unwrap_or(0) + 4;
    let mut text = String::new();
    for group in GROUPS {
        let _ = writeln!(text, "\n{}:", group.title);
        for command in group.commands.iter().filter_map(|(name, _)| program.find_subcommand(name)) {
            let about = command.get_about().map(ToString::to_string).unwrap_or_default();
            let name = format!("  {}", command.get_name());
            let _ = writeln!(text, "{name:<width$}{}", wrapped(&about, width, WIDTH));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn every_command_stands_in_one_group_and_has_an_example_that_parses() {
        let program = with_groups(crate::Cli::command());
        let listed: Vec<&str> =
            GROUPS.iter().flat_map(|group| group.commands).map(|(name, _)| *name).collect();
        for command in program.get_subcommands().filter(|command| !command.is_hide_set()) {
            let n = listed.iter().filter(|name| **name == command.get_name()).count();
            assert_eq!(n, 1, "{}", command.get_name());
        }
        let exists = |name: &&str| program.find_subcommand(name).is_some();
        for (name, examples) in
            GROUPS.iter().flat_map(|group| group.commands).filter(|(name, _)| exists(name))
        {
            for example in examples.lines() {
                let example = example.split(" > ").next().unwrap().split(" | ").next().unwrap();
                let example = example.split("     ").next().unwrap();
                let words = example.replace("'What is 2+2?'", "'What'");
                let parsed = crate::Cli::command().try_get_matches_from(words.split_whitespace());
                assert!(parsed.is_ok(), "{example}: {:?}", parsed.err());
                assert!(example.starts_with(&format!("stapo {name}")), "{example}");
            }
        }
    }

    #[test]
    fn help_begins_with_what_the_program_does() {
        let help = with_groups(crate::Cli::command()).render_help().to_string();
        assert!(help.starts_with("Trains language models by reinforcement learning"), "{help}");
    }

    #[test]
    fn help_fits_eighty_columns() {
        fn check(command: &mut Command) {
            for line in command.render_long_help().to_string().lines() {
                assert!(line.chars().count() <= WIDTH, "{}: {line}", command.get_name());
            }
            let names: Vec<String> =
                command.get_subcommands().map(|below| below.get_name().to_string()).collect();
            for name in names {
                check(command.find_subcommand_mut(&name).unwrap());
            }
        }
        let mut program = with_groups(crate::Cli::command());
        program.build();
        check(&mut program);
    }
}
