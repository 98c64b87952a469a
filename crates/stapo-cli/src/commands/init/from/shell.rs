//! The settings in a shell script that starts TRL, verl or OpenRLHF. Nothing is run: assignments, variables, arrays and sums are
//! followed, and what only a running shell knows stays as `${NAME}`.

use super::sum::{self, is_name};
use super::translate::is_of_trl;
use super::yaml;
use std::collections::BTreeMap;
use toml::Value;

/// The settings of every command that starts a training.
pub fn trainings(text: &str) -> Vec<Vec<(String, Value)>> {
    let environment = |name: &str| std::env::var(name).ok();
    let commands = Reader::new(text, &environment).commands();
    let of_command = |words: &Vec<String>| {
        let overrides = overrides(words);
        let is_verl =
            |path: &str| ["actor_rollout_ref.", "algorithm."].iter().any(|top| path.starts_with(top));
        if overrides.iter().any(|(path, _)| is_verl(path)) { Some(overrides) } else { flags(words) }
    };
    commands.iter().filter_map(of_command).collect()
}

/// Hydra's overrides: `actor_rollout_ref.rollout.n=5`, `+trainer.val_before_train=True`.
fn overrides(words: &[String]) -> Vec<(String, Value)> {
    let is_path = |path: &str| path.contains('.') && path.split('.').all(is_name);
    let setting = |word: &String| {
        let (path, value) = word.trim_start_matches('+').split_once('=')?;
        is_path(path).then(|| Some((path.to_string(), yaml::scalar(value)?)))?
    };
    words.iter().filter_map(setting).collect()
}

/// `--num_generations 8 --bf16 --reward_funcs accuracy format`, where they are settings of TRL or OpenRLHF, or name a config of TRL.
fn flags(words: &[String]) -> Option<Vec<(String, Value)>> {
    let mut found: Vec<(String, Vec<Value>)> = Vec::new();
    // Flags in front of the program belong to what starts it.
    let is_openrlhf = |word: &String| word.starts_with("openrlhf.cli.train_ppo");
    let is_program = |word: &String| {
        word.rsplit_once('.').is_some_and(|(_, ending)| ending == "py") || word == "grpo" || is_openrlhf(word)
    };
    let begin = words.iter().position(is_program).unwrap_or(0);
    for word in &words[begin..] {
        match (word.strip_prefix("--"), found.last_mut()) {
            (Some(flag), _) => {
                let (name, value) = flag.split_once('=').unwrap_or((flag, ""));
                found.push((name.replace('-', "_"), yaml::scalar(value).into_iter().collect()));
            }
            (None, Some((_, values))) => values.extend(yaml::scalar(word)),
            (None, None) => {}
        }
    }
    let n_known = found.iter().filter(|(name, _)| is_of_trl(name)).count();
    let has_config = found.iter().any(|(name, _)| name == "config");
    if n_known < 2
        && !words.iter().any(is_openrlhf)
        && !(has_config && words.iter().any(|word| word.contains("grpo")))
    {
        return None;
    }
    let value = |mut values: Vec<Value>| match values.len() {
        0 => Value::Boolean(true),
        1 => values.remove(0),
        _ => Value::Array(values),
    };
    Some(found.into_iter().map(|(name, values)| (name, value(values))).collect())
}

/// The name and the value of `NAME=value`.
fn assignment(word: &str) -> Option<(&str, &str)> {
    word.split_once('=').filter(|(name, _)| is_name(name))
}

/// Between the words of an array in the text of a word.
const NEXT_WORD: char = '\u{1f}';

/// Defaults of variables inside one another that are followed.
const MAX_DEFAULTS: usize = 20;

struct Reader<'a> {
    chars: Vec<char>,
    at: usize,
    /// `None` for a variable whose value depends on what a shell finds.
    variables: BTreeMap<String, Option<String>>,
    environment: &'a dyn Fn(&str) -> Option<String>,
    /// How many branches and loops are open.
    depth: usize,
    /// How many defaults of variables the text is inside of.
    n_defaults: usize,
    /// Whether the command runs only if the one before it does, or does not, succeed.
    is_conditional: bool,
}

impl<'a> Reader<'a> {
    fn new(text: &str, environment: &'a dyn Fn(&str) -> Option<String>) -> Self {
        let chars = text.replace("\r\n", "\n").chars().collect();
        let variables = BTreeMap::new();
        Self { chars, at: 0, variables, environment, depth: 0, n_defaults: 0, is_conditional: false }
    }

    fn peek(&self) -> Option<char> {
        self.chars.get(self.at).copied()
    }

    fn next_is(&self, expected: char) -> bool {
        self.chars.get(self.at + 1) == Some(&expected)
    }

    /// The words of all commands that are no assignments.
    fn commands(mut self) -> Vec<Vec<String>> {
        let mut commands = Vec::new();
        while self.at < self.chars.len() {
            let is_conditional = self.is_conditional;
            self.is_conditional = false;
            let words = self.command();
            if !self.assign(&words, is_conditional) {
                commands.push(words);
            }
        }
        commands
    }

    /// The words up to the end of a command.
    fn command(&mut self) -> Vec<String> {
        let mut words = Vec::new();
        while let Some(c) = self.peek() {
            match c {
                '\n' | ';' | '(' | ')' => {
                    self.at += 1;
                    break;
                }
                '&' | '|' => {
                    self.is_conditional = self.next_is(c);
                    self.at += 1 + usize::from(self.is_conditional);
                    break;
                }
                '\\' if self.next_is('\n') => self.at += 2,
                '#' => self.skip_comment(),
                ' ' | '\t' | '<' | '>' => self.at += 1,
                _ => words.extend(self.word()),
            }
        }
        words
    }

    /// Follows assignments and the words of branches and loops. False for any other command.
    fn assign(&mut self, words: &[String], is_conditional: bool) -> bool {
        let mut words = words;
        loop {
            let [first, rest @ ..] = words else { return true };
            match first.as_str() {
                "if" | "while" | "until" | "case" => self.depth += 1,
                "for" => {
                    self.depth += 1;
                    self.variables.extend(rest.first().map(|name| (name.clone(), None)));
                    return true;
                }
                "fi" | "done" | "esac" => self.depth = self.depth.saturating_sub(1),
                "then" | "else" | "elif" | "do" | "{" | "}" | "export" | "declare" | "local" | "readonly" => {
                }
                _ => break,
            }
            words = rest;
        }
        let assigned: Option<Vec<_>> = words.iter().map(|word| assignment(word)).collect();
        let Some(assigned) = assigned else { return false };
        let is_known = self.depth == 0 && !is_conditional;
        self.variables.extend(
            assigned.iter().map(|(name, value)| (name.to_string(), is_known.then(|| value.to_string()))),
        );
        true
    }

    /// A word with its variables, as several where an array or a text with blanks stands in it. A value that is assigned is one word.
    fn word(&mut self) -> Vec<String> {
        let mut word = String::new();
        let mut is_assigned = false;
        while let Some(c) = self.peek() {
            match c {
                ' ' | '\t' | '\n' | ';' | '&' | '|' | ')' | '<' | '>' => break,
                '(' if is_assigned && word.ends_with('=') => {
                    self.at += 1;
                    word.push_str(&self.array().join(&NEXT_WORD.to_string()));
                    break;
                }
                '(' => break,
                '$' => {
                    let text = self.expansion();
                    let split = |c: char| if c.is_whitespace() && !is_assigned { NEXT_WORD } else { c };
                    word.extend(text.chars().map(split));
                }
                _ => {
                    is_assigned |= c == '=' && is_name(&word);
                    self.piece(&mut word);
                }
            }
        }
        if is_assigned {
            return vec![word];
        }
        word.split(NEXT_WORD).filter(|word| !word.is_empty()).map(ToString::to_string).collect()
    }

    /// The words up to the closing bracket.
    fn array(&mut self) -> Vec<String> {
        let mut items = Vec::new();
        while let Some(c) = self.peek() {
            match c {
                '#' => self.skip_comment(),
                '\\' if self.next_is('\n') => self.at += 2,
                ' ' | '\t' | '\n' | ';' | '&' | '|' | '(' | '<' | '>' => self.at += 1,
                ')' => {
                    self.at += 1;
                    break;
                }
                _ => items.extend(self.word()),
            }
        }
        items
    }

    fn skip_comment(&mut self) {
        while self.peek().is_some_and(|c| c != '\n') {
            self.at += 1;
        }
    }

    /// A character, a quoted text or an escaped character.
    fn piece(&mut self, word: &mut String) {
        let Some(c) = self.peek() else { return };
        self.at += 1;
        match c {
            '\'' => {
                while let Some(c) = self.peek() {
                    self.at += 1;
                    if c == '\'' {
                        break;
                    }
                    word.push(c);
                }
            }
            '"' => {
                while let Some(c) = self.peek() {
                    match c {
                        '"' => {
                            self.at += 1;
                            break;
                        }
                        '$' => word.push_str(&self.expansion()),
                        '\\' => self.escaped(word),
                        c => {
                            word.push(c);
                            self.at += 1;
                        }
                    }
                }
            }
            '\\' => {
                self.at -= 1;
                self.escaped(word);
            }
            '`' => word.push_str("$(`)"),
            c => word.push(c),
        }
    }

    /// What a backslash leaves: nothing of the end of a line, and any other character as it is.
    fn escaped(&mut self, word: &mut String) {
        self.at += 1;
        word.extend(self.peek().filter(|c| *c != '\n'));
        self.at += 1;
    }

    /// The text of what begins with a dollar.
    fn expansion(&mut self) -> String {
        self.at += 1;
        match self.peek() {
            Some('(') => {
                let inner = self.enclosed('(', ')');
                let sum = inner.strip_prefix('(').and_then(|text| text.strip_suffix(')'));
                let integer = |name: &str| self.variable(name)?.parse().ok();
                let value = sum.and_then(|text| sum::value(&unbraced(text), &integer));
                value.map_or_else(|| format!("$({inner})"), |value| value.to_string())
            }
            Some('{') => {
                let inner = self.enclosed('{', '}');
                self.parameter(&inner)
            }
            Some('@' | '*') => {
                self.at += 1;
                String::new()
            }
            Some(c) if c == '_' || c.is_ascii_alphanumeric() => {
                let begin = self.at;
                while self.peek().is_some_and(|c| c == '_' || c.is_ascii_alphanumeric()) {
                    self.at += 1;
                }
                let name: String = self.chars[begin..self.at].iter().collect();
                self.variable(&name).unwrap_or_else(|| format!("${{{name}}}"))
            }
            _ => "$".to_string(),
        }
    }

    /// `NAME`, `NAME[@]` and `NAME:-otherwise`.
    fn parameter(&self, inner: &str) -> String {
        let end = inner.find(|c: char| c != '_' && !c.is_ascii_alphanumeric()).unwrap_or(inner.len());
        let (name, rest) = inner.split_at(end);
        let otherwise = [":-", ":=", "-", "="].iter().find_map(|sign| rest.strip_prefix(sign));
        let known = self.variable(name).filter(|value| !(rest.starts_with(':') && value.is_empty()));
        match (known, otherwise, rest) {
            (Some(value), Some(_), _) | (Some(value), None, "" | "[@]" | "[*]") => value,
            // A variable that a branch sets may be set or not.
            (None, Some(otherwise), _) if self.variables.get(name) != Some(&None) => self.expanded(otherwise),
            _ => format!("${{{inner}}}"),
        }
    }

    /// A text with its variables and without its quotes.
    fn expanded(&self, text: &str) -> String {
        if self.n_defaults == MAX_DEFAULTS {
            return format!("${{{text}}}");
        }
        let mut inner = Reader::new(text, self.environment);
        inner.variables.clone_from(&self.variables);
        inner.n_defaults = self.n_defaults + 1;
        let mut expanded = String::new();
        while let Some(c) = inner.peek() {
            match c {
                '$' => expanded.push_str(&inner.expansion()),
                _ => inner.piece(&mut expanded),
            }
        }
        expanded
    }

    fn variable(&self, name: &str) -> Option<String> {
        match self.variables.get(name) {
            Some(value) => value.clone(),
            None => (self.environment)(name),
        }
    }

    /// The text between a bracket, at which the reader stands, and the one that closes it.
    fn enclosed(&mut self, open: char, close: char) -> String {
        let mut depth = 0;
        let begin = self.at + 1;
        while let Some(c) = self.peek() {
            depth += i32::from(c == open) - i32::from(c == close);
            self.at += 1;
            if depth == 0 {
                return self.chars[begin..self.at - 1].iter().collect();
            }
        }
        self.chars[begin.min(self.chars.len())..].iter().collect()
    }
}

/// A sum in which `${name}` is `name`.
fn unbraced(text: &str) -> String {
    text.replace("${", " ").replace('}', " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The settings of the only training, as `NAME=VALUE`.
    fn settings(text: &str) -> Vec<String> {
        let mut trainings = trainings(text);
        assert_eq!(trainings.len(), 1, "{trainings:?}");
        trainings.remove(0).into_iter().map(|(name, value)| format!("{name}={value}")).collect()
    }

    /// The words of the command `run`.
    fn words(text: &str) -> String {
        let environment = |name: &str| (name == "HOME").then(|| "/home/me".to_string());
        let commands = Reader::new(text, &environment).commands();
        let of_run = commands.iter().filter(|words| words.first().is_some_and(|word| word == "run"));
        of_run.flat_map(|words| words[1..].to_vec()).collect::<Vec<_>>().join("|")
    }

    #[test]
    fn words_are_those_of_a_shell() {
        for (script, expected) in [
            ("A=1 # one\nB=\"$A 2\"\nrun $A '$A' \"$B\" $B \"\\$A\" a\\ b", "1|$A|1 2|1|2|$A|a b"),
            (
                "run $HOME/a ${HOME}/b ${NONE:-\"${HOME}/c\"} ${NONE} $1 $@",
                "/home/me/a|/home/me/b|/home/me/c|${NONE}|${1}",
            ),
            (
                "N=$((1024 * 2)); run $(((N + 8) * 2)) $((${N}+$N)) $((N / 3)) $(date)",
                "4112|4096|$((N|/|3))|$(date)",
            ),
            ("A=(\n  x=1 # first\n  'y z' \\\n  w\n)\nrun \"${A[@]}\" end", "x=1|y z|w|end"),
            ("run a \\\n  b\\\nc \\\r\n d > log 2>&1", "a|bc|d|log|2"),
            ("A=1\nif [ -z $B ]; then\n  A=2\nfi\nexport C=3\nrun $A $C", "${A}|3"),
            ("[ -z $B ] && A=2\nB=4; run $A ${B:-5} ${D:=6} ${A:-7}", "${A}|4|6|${A:-7}"),
            ("for s in 1 2; do\n  run $s\ndone", "${s}"),
            ("s=0\nfor s in 1 2; do\n  :\ndone\nrun $s", "${s}"),
            ("A=(x y); run ${A[@]}", "x|y"),
            ("E=\nrun \"${E:-x}\" ${E-y}z `date`", "x|z|$(`)date$(`)"),
            ("run ${A%.*} \"open", "${A%.*}|open"),
        ] {
            assert_eq!(words(script), expected, "{script}");
        }
    }

    #[test]
    fn a_script_of_verl_has_its_overrides() {
        let script = "#!/bin/bash\nset -x\nn=4\nfiles=\"['a.parquet', 'b.parquet']\"\npip install verl==0.9.1\n\
            python3 -m verl.trainer.main_ppo --config-name=ppo_trainer \\\n    algorithm.adv_estimator=grpo \\\n    \
            data.train_files=\"$files\" data.truncation='error' \\\n    actor_rollout_ref.rollout.n=$n \\\n    \
            +trainer.val_before_train=False trainer.logger=['console','wandb'] \\\n    \
            actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.model.path=$MODEL_THAT_NOBODY_SET $@\n";
        let expected = [
            "algorithm.adv_estimator=\"grpo\"",
            "data.train_files=[\"a.parquet\", \"b.parquet\"]",
            "data.truncation=\"error\"",
            "actor_rollout_ref.rollout.n=4",
            "trainer.val_before_train=false",
            "trainer.logger=[\"console\", \"wandb\"]",
            "actor_rollout_ref.actor.optim.lr=0.000001",
            "actor_rollout_ref.model.path=\"${MODEL_THAT_NOBODY_SET}\"",
        ];
        assert_eq!(settings(script), expected);
    }

    #[test]
    fn a_script_of_trl_has_its_flags_and_other_commands_have_none() {
        let script = "vllm serve --temperature 0.5\naccelerate launch --config_file z.yaml train.py \\\n  \
            --model_name_or_path Qwen/Qwen3-0.6B --num-generations=16 --bf16 --reward_funcs accuracy format --beta -1\n";
        let expected = [
            "model_name_or_path=\"Qwen/Qwen3-0.6B\"",
            "num_generations=16",
            "bf16=true",
            "reward_funcs=[\"accuracy\", \"format\"]",
            "beta=-1",
        ];
        assert_eq!(settings(script), expected);
        assert_eq!(settings("trl grpo --config a.yaml"), ["config=\"a.yaml\""]);
        assert!(trainings("vllm serve --temperature 0.5 --config a.yaml\nls\n").is_empty());
        let openrlhf = "cd /openrlhf\ndeepspeed --module openrlhf.cli.train_sft --l2 1\nray job submit --no-wait \\\n  \
            -- python3 -m openrlhf.cli.train_ppo_ray --colocate_all_models --eps_clip_low_high 0.2 0.3\n";
        assert_eq!(settings(openrlhf), ["colocate_all_models=true", "eps_clip_low_high=[0.2, 0.3]"]);
        let two = "run algorithm.gamma=1\nrun algorithm.gamma=2\n";
        assert_eq!(trainings(two).len(), 2);
    }

    #[test]
    fn a_script_may_end_anywhere_and_nest_deeply() {
        let script = "A=(x \"y $((1 + (2)))\" # z\n)\nif [ $# ]; then B='c'; fi\nrun \\\n a.b=\"${A[@]:-`d`}\" ${C:=\\$}&&e|f>g";
        for end in 0..=script.len() {
            trainings(&script[..end]);
        }
        let nested = |n: usize| words(&format!("run {}x{}", "${A:-".repeat(n), "}".repeat(n)));
        assert_eq!((nested(20), nested(1000).starts_with("${")), ("x".into(), true));
    }
}
