//! The settings in a Python file that starts TRL: the arguments of `GRPOConfig`, `GRPOTrainer` and `LoraConfig`. Nothing is run:
//! literals, names of literals and sums are followed, and any other expression stays as `${EXPRESSION}`.

use super::sum::{self, is_name};
use super::translate::is_of_trl;
use super::yaml;
use std::collections::BTreeMap;
use toml::Value;

/// The settings of every `GRPOConfig`, or of every trainer where there is none, with those of the adapter.
pub fn trainings(text: &str) -> Vec<Vec<(String, Value)>> {
    let code = Code::new(text);
    let names = code.names();
    let trainer = code.calls("GRPOTrainer").into_iter().flat_map(|call| settings_of(call, &names));
    let mut others: Vec<_> = trainer.filter(|(name, _)| is_of_trl(name)).collect();
    if let [adapter] = &code.calls("LoraConfig")[..] {
        others.push(("use_peft".to_string(), Value::Boolean(true)));
        for (name, value) in settings_of(adapter, &names) {
            match name.as_str() {
                "r" | "target_modules" => others.push((format!("lora_{name}"), value)),
                _ => others.push((name, value)),
            }
        }
    }
    let mut trainings: Vec<Vec<_>> =
        code.calls("GRPOConfig").into_iter().map(|call| settings_of(call, &names)).collect();
    if trainings.is_empty() && !others.is_empty() {
        trainings.push(Vec::new());
    }
    for training in &mut trainings {
        training.extend(others.iter().cloned());
    }
    trainings
}

/// A file without its comments.
struct Code {
    text: String,
    /// Whether each byte is inside a string.
    is_string: Vec<bool>,
}

type Names = BTreeMap<String, Option<Value>>;

impl Code {
    fn new(source: &str) -> Self {
        let (mut text, mut is_string) = (String::new(), Vec::new());
        let mut rest = source;
        while let Some(c) = rest.chars().next() {
            let n_bytes = match c {
                '#' => {
                    rest = &rest[rest.find('\n').unwrap_or(rest.len())..];
                    continue;
                }
                '"' | '\'' => string_length(rest),
                c => c.len_utf8(),
            };
            text.push_str(&rest[..n_bytes]);
            is_string.resize(text.len(), c == '"' || c == '\'');
            rest = &rest[n_bytes..];
        }
        Self { text, is_string }
    }

    /// The arguments of all calls of a function.
    fn calls(&self, function: &str) -> Vec<&str> {
        let call = format!("{function}(");
        let places = self.text.match_indices(&call).map(|(place, _)| place);
        let is_call = |place: &usize| {
            let before = self.text[..*place].chars().next_back();
            !self.is_string[*place] && !before.is_some_and(|c| c == '_' || c.is_alphanumeric())
        };
        places.filter(is_call).map(|place| self.up_to_end(place + call.len())).collect()
    }

    /// The text from a place up to the bracket that closes it.
    fn up_to_end(&self, begin: usize) -> &str {
        self.up_to(begin, false)
    }

    /// The text from a place up to the bracket that closes it, or to the end of the line outside of brackets.
    fn up_to(&self, begin: usize, ends_with_line: bool) -> &str {
        let mut depth = 0;
        let code = self.text[begin..].char_indices().filter(|(offset, _)| !self.is_string[begin + offset]);
        for (offset, c) in code {
            match c {
                '(' | '[' | '{' => depth += 1,
                ')' | ']' | '}' if depth == 0 => return &self.text[begin..begin + offset],
                '\n' if depth == 0 && ends_with_line => return &self.text[begin..begin + offset],
                ')' | ']' | '}' => depth -= 1,
                _ => {}
            }
        }
        &self.text[begin..]
    }

    /// The names that a line gives a value: `lr = 1e-6`. A name with several values has none that is known.
    fn names(&self) -> Names {
        let mut names = Names::new();
        let mut next_line = 0;
        for line in self.text.split_inclusive('\n') {
            let line_start = next_line;
            next_line += line.len();
            let Some((name, _)) = line.split_once('=').filter(|_| !self.is_string[line_start]) else {
                continue;
            };
            let value = self.up_to(line_start + name.len() + 1, true);
            let name = name.split(':').next().unwrap_or_default().trim();
            if !is_name(name) {
                continue;
            }
            let is_argument = value.trim_end().ends_with(',');
            let found = if is_argument { None } else { value_of(value.trim(), &names) };
            let is_again = names.contains_key(name);
            names.insert(name.to_string(), found.filter(|_| !is_again));
        }
        names
    }
}

/// The named arguments of a call.
fn settings_of(call: &str, names: &Names) -> Vec<(String, Value)> {
    let setting = |part: String| {
        let (name, expression) = part.split_once('=')?;
        let (name, expression) = (name.trim(), expression.trim());
        if !is_name(name) || expression.starts_with('=') || expression == "None" {
            return None;
        }
        let value = match value_of(expression, names) {
            Some(value) => value,
            // Functions go by their names.
            None if name == "reward_funcs" => yaml::scalar(expression)?,
            None => Value::String(format!("${{{expression}}}")),
        };
        Some((name.to_string(), value))
    };
    parts(call).into_iter().filter_map(setting).collect()
}

/// The bytes of the string that a text begins with.
fn string_length(text: &str) -> usize {
    let quote = &text[..1];
    let triple = quote.repeat(3);
    let end = if text.starts_with(&triple) { &triple } else { quote };
    let mut at = end.len();
    while at < text.len() {
        if text[at..].starts_with(end) {
            return at + end.len();
        }
        let mut chars = text[at..].chars();
        let c = chars.next().unwrap_or_default();
        at += c.len_utf8();
        if c == '\\' {
            at += chars.next().map_or(0, char::len_utf8);
        } else if c == '\n' && end.len() == 1 {
            return at;
        }
    }
    text.len()
}

/// The parts of a list of arguments.
fn parts(arguments: &str) -> Vec<String> {
    let code = Code::new(arguments);
    let (mut parts, mut part, mut depth) = (Vec::new(), String::new(), 0);
    for (place, c) in code.text.char_indices() {
        let is_code = !code.is_string[place];
        match c {
            '(' | '[' | '{' if is_code => depth += 1,
            ')' | ']' | '}' if is_code => depth -= 1,
            ',' if is_code && depth == 0 => {
                parts.push(std::mem::take(&mut part));
                continue;
            }
            _ => {}
        }
        part.push(c);
    }
    parts.push(part);
    parts
}

/// The value of a literal, of a known name, of a sum, or of the file or model that a call opens.
fn value_of(expression: &str, names: &Names) -> Option<Value> {
    if let Some(known) = names.get(expression) {
        return known.clone();
    }
    let integer = |name: &str| names.get(name)?.as_ref()?.as_integer();
    if let Some(sum) = sum::value(expression, &integer) {
        return Some(Value::Integer(sum));
    }
    let first = expression.chars().next()?;
    if first == '"' || first == '\'' {
        let quote = if expression.starts_with(&first.to_string().repeat(3)) { 3 } else { 1 };
        let inner = expression.get(quote..expression.len().checked_sub(quote)?)?;
        let is_plain = string_length(expression) == expression.len() && !inner.contains('\\');
        return is_plain.then(|| Value::String(inner.to_string()));
    }
    let is_literal = match first {
        '[' | '{' => Code::new(expression).up_to_end(1).len() + 2 == expression.len(),
        _ => matches!(expression, "True" | "False") || expression.replace('_', "").parse::<f64>().is_ok(),
    };
    if is_literal {
        // Names in a list stay texts in YAML, as functions do.
        let has_names =
            first == '[' && items(expression).any(|item| item.starts_with(|c: char| c.is_alphabetic()));
        let plain = if first.is_ascii_digit() { expression.replace('_', "") } else { expression.to_string() };
        return yaml::scalar(&plain).filter(|_| !has_names);
    }
    let (function, arguments) = expression.strip_suffix(')')?.split_once('(')?;
    let opens = ["load_dataset", "from_pretrained"].iter().any(|name| function.ends_with(name));
    let arguments = parts(arguments);
    let given = |name: &str| {
        arguments.iter().find_map(|part| part.split_once('=').filter(|(key, _)| key.trim() == name))
    };
    let file = given("data_files").map(|(_, file)| file.trim());
    let opened = file.or(arguments.first().map(|first| first.trim())).filter(|_| opens)?;
    // A name, a path or a list of paths: calls inside of calls are not followed.
    let is_plain = !opened.contains('(');
    is_plain.then(|| value_of(opened, names)).flatten().filter(|value| value.is_str() || value.is_array())
}

/// What stands between the brackets of a list.
fn items(list: &str) -> impl Iterator<Item = String> {
    let inner = list.strip_prefix('[').and_then(|list| list.strip_suffix(']')).unwrap_or_default();
    parts(inner).into_iter().map(|part| part.trim().to_string()).filter(|part| !part.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(text: &str) -> Vec<String> {
        let mut trainings = trainings(text);
        assert_eq!(trainings.len(), 1, "{trainings:?}");
        trainings.remove(0).into_iter().map(|(name, value)| format!("{name}={value}")).collect()
    }

    #[test]
    fn arguments_are_literals_names_sums_or_left_open() {
        let text = "\"\"\"Starts\nGRPOConfig(seed=1).\"\"\"\nfrom trl import GRPOConfig\nlongest: int = 1_024\nlr = 1e-6 # (small\n\
            twice = 1\ntwice = 2\ndataset = load_dataset(\"json\", data_files='rows.jsonl', split=\"train\")\n\
            args = trl.GRPOConfig(\n    \"out\", learning_rate=lr, # GRPOConfig(\n    max_completion_length=longest * 2 - 48,\n    \
            num_generations=16, beta=-0.5, bf16=True, run_name=f\"a-{lr}\", seed=twice, steps=len(rows),\n    \
            chat_template_kwargs={\"enable_thinking\": False}, report_to=None, note='a, b=\\'c\\')', mode=MyGRPOConfig(1),\n)\n\
            trainer = GRPOTrainer(model=\"Qwen/Qwen3-0.6B\", args=args, reward_funcs=[accuracy_reward, mine],\n    \
            train_dataset=dataset, peft_config=LoraConfig(r=8, lora_alpha=16, target_modules=[\"q_proj\", \"v_proj\"]))\n";
        let expected = [
            "learning_rate=0.000001",
            "max_completion_length=2000",
            "num_generations=16",
            "beta=-0.5",
            "bf16=true",
            "run_name='${f\"a-{lr}\"}'",
            "seed=\"${twice}\"",
            "steps=\"${len(rows)}\"",
            "chat_template_kwargs={ enable_thinking = false }",
            "note='''${'a, b=\\'c\\')'}'''",
            "mode=\"${MyGRPOConfig(1)}\"",
            "model=\"Qwen/Qwen3-0.6B\"",
            "reward_funcs=[\"accuracy_reward\", \"mine\"]",
            "train_dataset=\"rows.jsonl\"",
            "use_peft=true",
            "lora_r=8",
            "lora_alpha=16",
            "lora_target_modules=[\"q_proj\", \"v_proj\"]",
        ];
        assert_eq!(settings(text), expected);
    }

    #[test]
    fn a_trainer_alone_is_a_training_and_two_configs_are_two() {
        let alone =
            "model = AutoModel.from_pretrained('m')\nGRPOTrainer(model=model, reward_funcs=accuracy_reward)";
        assert_eq!(settings(alone), ["model=\"m\"", "reward_funcs=\"accuracy_reward\""]);
        let rows = "GRPOTrainer(train_dataset=load_dataset('a/b', 'main', split='train'))";
        assert_eq!(settings(rows), ["train_dataset=\"a/b\""]);
        assert_eq!(settings("GRPOConfig(seed == 3, **dict(beta=0.5), seed=4)"), ["seed=4"]);
        assert_eq!(trainings("GRPOConfig(seed=1)\nGRPOConfig(seed=2)").len(), 2);
        assert!(trainings("x = 1\n").is_empty() && trainings("").is_empty());
        // Cut off anywhere.
        let text = "GRPOConfig(a='b\\'é', b=[1, (2)], # c\n d={'e': 1}, f=\"\"\"g\n\"\"\", h=load_dataset('i'), j=-(k + 1))";
        for end in (11..=text.len()).filter(|end| text.is_char_boundary(*end)) {
            assert_eq!(trainings(&text[..end]).len(), 1, "{end}");
        }
    }
}
