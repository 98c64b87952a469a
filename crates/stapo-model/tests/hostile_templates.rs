//! Templates written to harm the program are refused in words, and the process lives.

use crate::inside::{in_own_process, peak_mib};
use serde_json::Map;
use stapo_model::template::{Dialect, Limits, Template};
use stapo_model::{ChatTemplate, Message};

const CASES: &str = include_str!("cases/hostile_templates.txt");
/// The largest memory of the process: a few times the budget of one rendering.
const MAX_RESIDENT_MIB: u64 = 1024;

struct Case {
    name: String,
    words: String,
    source: String,
}

fn cases() -> Vec<Case> {
    let read = |case: &str| {
        let (head, body) = case.split_once('\n').unwrap();
        let (name, words) = head.split_once(" -> ").unwrap();
        Case { name: name.into(), words: words.into(), source: expanded(body.trim_end_matches('\n')) }
    };
    CASES.split("\n## ").skip(1).map(read).collect()
}

/// The text with every `[[n|text]]` written out.
fn expanded(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find("[[") {
        let (before, marked) = rest.split_at(at);
        out.push_str(before);
        let inside = &marked[2..];
        let times = inside.split_once('|').and_then(|(number, after)| Some((number.parse().ok()?, after)));
        let Some((times, after)) = times else {
            out.push('[');
            rest = &marked[1..];
            continue;
        };
        // A closing bracket directly before the mark's end belongs to the text.
        let mut end = after.find("]]").unwrap();
        while after[end + 2..].starts_with(']') {
            end += 1;
        }
        out.push_str(&after[..end].repeat(times));
        rest = &after[end + 2..];
    }
    out + rest
}

#[test]
fn hostile_templates_are_refused_and_the_process_lives() {
    let all = cases();
    assert!(all.len() >= 120, "{} cases", all.len());
    in_own_process("hostile_templates::hostile_templates_are_refused_and_the_process_lives", || {
        render_all(&all);
    });
}

fn render_all(all: &[Case]) {
    let limits = Limits { steps: 600_000, work_bytes: 8 << 20, output_bytes: 4 << 20 };
    let mut wrong = Vec::new();
    for case in all {
        println!("case {}", case.name);
        let start = std::time::Instant::now();
        let message = Message { role: "user".into(), content: "hello".into() };
        let rendered = ChatTemplate::new("model", &case.source, [].into())
            .and_then(|template| template.prompt(&[message], &Map::new()));
        match rendered {
            Err(error) if case.words == "*" || error.to_string().to_lowercase().contains(&case.words) => {
                assert!(error.to_string().starts_with("model: chat template: "), "{error}");
            }
            Err(error) => wrong.push(format!("{}: {error}", case.name)),
            Ok(_) if case.words == "*" => {}
            Ok(text) => wrong.push(format!("{}: rendered {} bytes", case.name, text.len())),
        }
        // An undefined variable is an error in this dialect, so the refusal may be another.
        let prompt = Template::new(case.source.clone(), Dialect::Prompt)
            .and_then(|template| template.render(&minijinja::context!(x => "x"), limits));
        if let Ok(text) = prompt
            && case.words != "*"
        {
            wrong.push(format!("{}: a prompt of {} bytes", case.name, text.len()));
        }
        println!("    {} ms", start.elapsed().as_millis());
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    println!("{} hostile templates, each in two dialects; peak memory {} MiB", all.len(), peak_mib());
    assert!(peak_mib() < MAX_RESIDENT_MIB);
}
