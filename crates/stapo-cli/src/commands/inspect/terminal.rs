//! Responses on a terminal: a background colour per token, or signs around tokens on terminals without colours.

use super::{Fate, fate};
use crate::shared::chart::number;
use crate::shared::terminal::has_color;
use crate::shared::viewer::{Inspected, gradient_norm, opinion};
use anyhow::Result;
use stapo_core::record::ResponseRecord;
use stapo_core::{EpisodeTurn, ProgramRun};
use std::fmt::Write as _;
use std::io::{Write, stdout};

/// The quantity that background colours show.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum By {
    Fate,
    Probability,
    Entropy,
    Advantage,
    Ratio,
    GradientNorm,
}

pub fn print(inspected: &Inspected, by: By) -> Result<()> {
    let colored = has_color(&stdout());
    let text = rendered(inspected, by, colored);
    Ok(stdout().lock().write_all(text.as_bytes())?)
}

fn rendered(inspected: &Inspected, by: By, colored: bool) -> String {
    let mut out = format!("{}, step {}: {}\n", plain(&inspected.run), inspected.step, legend(by, colored));
    for response in &inspected.responses {
        let _ = write!(
            out,
            "\n{} #{}  {}  A {:+.4}  {} tokens\n  {}  [reference {}]\n  ",
            plain(&response.problem_id),
            response.sample_idx,
            serde_json::to_value(response.verdict)
                .unwrap_or_default()
                .as_str()
                .unwrap_or("?")
                .replace('_', " "),
            response.advantage,
            response.tokens.id.len(),
            plain(&response.prompt),
            plain(&response.reference)
        );
        let n_tokens = response.tokens.id.len();
        let turns = response.episode.iter().flat_map(|episode| &episode.turns);
        let mut turns = turns.enumerate();
        for t in 0..=n_tokens {
            if let Some(text) = response.given_before(t) {
                let border = turns.next().map(|(idx, turn)| border(idx, turn));
                out.push_str(&border.unwrap_or_default());
                out.push_str(&given(text, colored));
                out.push_str(if response.episode.is_some() { "\n  " } else { "" });
            }
            if t < n_tokens {
                out.push_str(&token(response, t, by, colored));
            }
        }
        out.push('\n');
        out.extend(response.program.as_deref().map(program));
        out.extend(response.judge.as_deref().map(|judge| format!("  {}\n", plain(&opinion(judge)))));
        for t in (0..response.tokens.id.len()).filter(|&t| fate(response, t) != Fate::Kept) {
            out.push_str(&token_line(response, t));
        }
    }
    out
}

fn legend(by: By, colored: bool) -> String {
    match (by, colored) {
        (By::Fate, true) => format!(
            "{} {} {}",
            painted("silenced", (160, 70, 0), true),
            painted("candidate, kept", (120, 90, 0), false),
            painted("clipped", (110, 50, 95), false)
        ),
        (_, true) => format!("background by {by:?}, little to much"),
        (_, false) => "[-silenced-] [?candidate, kept?] [~clipped~]".to_string(),
    }
}

fn token(response: &ResponseRecord, t: usize, by: By, colored: bool) -> String {
    let text = plain(&response.tokens.text[t]);
    let fate = fate(response, t);
    if !colored {
        return match fate {
            Fate::Kept => text,
            Fate::Silenced => format!("[-{text}-]"),
            Fate::Candidate => format!("[?{text}?]"),
            Fate::Clipped => format!("[~{text}~]"),
        };
    }
    let tokens = &response.tokens;
    let (warm, cold) = ((170.0, 70.0, 0.0), (0.0, 90.0, 160.0));
    let signed = |value: f64, end: f64| shade(value.abs() / end, if value < 0.0 { warm } else { cold });
    let color = match by {
        By::Fate => match fate {
            Fate::Kept => return text,
            Fate::Silenced => (160, 70, 0),
            Fate::Candidate => (120, 90, 0),
            Fate::Clipped => (110, 50, 95),
        },
        By::Probability => shade(-tokens.logp[t] / 1e4f64.ln(), warm),
        By::Entropy => shade(tokens.entropy[t] / 2.0, cold),
        By::Advantage => signed(response.advantage, 2.5),
        By::Ratio => signed(tokens.ratio[t].ln(), 0.25),
        By::GradientNorm => shade(gradient_norm(response, t).unwrap_or(0.0) / 2.0, (130.0, 50.0, 110.0)),
    };
    painted(&text, color, fate == Fate::Silenced)
}

/// A shade between black and a dark colour, so that white text stays readable on all of them.
fn shade(part: f64, (r, g, b): (f64, f64, f64)) -> (u8, u8, u8) {
    let part = part.clamp(0.0, 1.0);
    ((r * part) as u8, (g * part) as u8, (b * part) as u8)
}

/// What the tests of a response's program showed. The program itself is among the tokens.
fn program(run: &ProgramRun) -> String {
    let mut out =
        format!("  program: {}, {} s of processor time\n", run.end.label(), number(run.cpu_seconds));
    let parts = [("failing test", run.failing_test.as_deref()), ("printed", Some(run.printed.as_str()))];
    for (name, text) in parts.into_iter().filter_map(|(name, text)| Some((name, text?))) {
        if !text.is_empty() {
            let _ = writeln!(out, "  {name}: {}", plain(text));
        }
    }
    out
}

/// The end of a turn: its number, its rewards and its calls.
fn border(idx: usize, turn: &EpisodeTurn) -> String {
    let later = turn.returns.first().map_or(String::new(), |value| format!("  return {}", number(*value)));
    let mut out = format!("\n  turn {}: reward {}{later}\n", idx + 1, number(turn.reward));
    for call in &turn.calls {
        let end = match (call.timed_out, call.failed) {
            (true, _) => "  timed out",
            (false, true) => "  failed",
            (false, false) => "",
        };
        let tool = if call.tool.is_empty() { "unreadable".to_string() } else { plain(&call.tool) };
        let _ = writeln!(out, "  call {tool}({}){end}", plain(&call.arguments));
    }
    format!("{out}  ")
}

/// Text that the policy was given between its turns.
fn given(text: &str, colored: bool) -> String {
    let text = plain(text);
    if colored { format!("\x1b[2m{text}\x1b[0m") } else { format!("[={text}=]") }
}

fn painted(text: &str, (r, g, b): (u8, u8, u8), struck: bool) -> String {
    let strike = if struck { ";9" } else { "" };
    format!("\x1b[38;2;255;255;255;48;2;{r};{g};{b}{strike}m{text}\x1b[0m")
}

/// A line with the numbers of a token that is a candidate, clipped or silenced.
fn token_line(response: &ResponseRecord, t: usize) -> String {
    let tokens = &response.tokens;
    let name = match fate(response, t) {
        Fate::Kept => "kept",
        Fate::Candidate => "candidate, kept",
        Fate::Clipped => "clipped",
        Fate::Silenced => "silenced",
    };
    let preferred = tokens.alternatives.get(t).and_then(|list| list.first()).map_or(String::new(), |first| {
        format!("  preferred “{}” {} %", plain(&first.text), number(100.0 * first.logp.exp()))
    });
    let norm =
        gradient_norm(response, t).map_or(String::new(), |norm| format!("  gradient norm {}", number(norm)));
    format!(
        "    {t:>4} “{}”  {name}  p {} %  H {} nats  ratio {}{norm}{preferred}\n",
        plain(&tokens.text[t]),
        number(100.0 * tokens.logp[t].exp()),
        number(tokens.entropy[t]),
        number(tokens.ratio[t])
    )
}

/// Replaces control characters by visible signs, so that a response cannot send commands to the terminal.
fn plain(text: &str) -> String {
    let sign = |c: char| match c {
        '\n' => '⏎',
        '\t' => '⇥',
        '\u{0}'..='\u{1f}' => char::from_u32(0x2400 + c as u32).unwrap_or('\u{fffd}'),
        '\u{7f}'..='\u{9f}' => '\u{fffd}',
        c => c,
    };
    text.chars().map(sign).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use stapo_core::{JudgeOpinion, ProgramEnd, Verdict};

    #[test]
    fn an_opinion_says_who_said_what() {
        let rule = JudgeOpinion::of_rule(Verdict::NoAnswer);
        let right = JudgeOpinion { verdict: Some(Verdict::Right), ..rule.clone() };
        let by_margin = JudgeOpinion { margin: Some(1.25), ..right.clone() };
        assert_eq!(opinion(&by_margin), "judge: right by +1.250 nats; rule: no answer");
        let written = JudgeOpinion { text: Some("A\u{1b}".into()), ..right };
        assert_eq!(opinion(&written), "judge: right; rule: no answer; it wrote \"A\\u{1b}\"");
        let scored = JudgeOpinion { score: Some(-0.5), ..rule.clone() };
        assert_eq!(opinion(&scored), "reward model: score -0.500; rule: no answer");
        assert_eq!(opinion(&rule), "judge or reward model: not asked; rule: no answer");
    }

    #[test]
    fn colours_have_their_names_and_shades() {
        assert_eq!(shade(0.5, (170.0, 70.0, 30.0)), (85, 35, 15));
        assert_eq!((shade(-1.0, (9.0, 9.0, 9.0)), shade(2.0, (1.0, 2.0, 3.0))), ((0, 0, 0), (1, 2, 3)));
        let white = "\x1b[38;2;255;255;255;48;2;";
        let named = [("160;70;0;9", "silenced"), ("120;90;0", "candidate, kept"), ("110;50;95", "clipped")];
        let named = named.map(|(color, name)| format!("{white}{color}m{name}\x1b[0m"));
        assert_eq!(legend(By::Fate, true), named.join(" "));
        assert_eq!(legend(By::Entropy, true), "background by Entropy, little to much");
        assert_eq!(legend(By::Entropy, false), "[-silenced-] [?candidate, kept?] [~clipped~]");
    }

    /// Four tokens, one of each fate: silenced, clipped, a candidate and kept.
    fn response() -> ResponseRecord {
        let alternatives =
            [("x", -1.0), ("s", -7.0)].map(|(text, logp)| json!({"id": 9, "text": text, "logp": logp}));
        serde_json::from_value(json!({
            "schema": 1, "step": 2, "problem_id": "q\u{1b}", "sample_idx": 3, "prompt": "1+1=", "reference": "2", "text": "sack",
            "verdict": "no_answer", "reward": -1.0, "advantage": -1.25, "finish": {"kind": "length_limit"},
            "given": [{"after": 4, "id": [5], "text": "more"}],
            "tokens": {
                "id": [1, 2, 3, 4], "text": ["s", "a", "c", "k"], "logp": [-7.0, 0.0, -2.0, -20.0],
                "behavior_logp": [0.0, 0.0, 0.0, 0.0], "entropy": [0.0, 1.0, 2.0, 3.0], "collision": [0.0, 1.0, 0.0, 0.0],
                "ratio": [1.0, 0.5, 2.0, 1.0], "kept": [false, true, true, true],
                "silenced_by": ["spurious", null, null, null], "clipped": [true, true, false, false],
                "is_candidate": [true, true, true, false], "weight": [1.0, 1.0, 2.0, 1.0], "d_logp": [0.0, 0.0, 0.0, 0.0],
                "alternatives": [alternatives],
            },
        }))
        .unwrap()
    }

    #[test]
    fn a_background_is_darker_the_less_there_is_of_the_quantity() {
        let response = response();
        let colors = |by: By| [0, 1, 2, 3].map(|t| token(&response, t, by, true));
        let painted = |colors: [(u8, u8, u8); 4]| {
            let texts = ["s", "a", "c", "k"].into_iter().zip(colors);
            texts.map(|(text, color)| painted(text, color, text == "s")).collect::<Vec<_>>()
        };
        assert_eq!(
            colors(By::Fate)[..3],
            painted([(160, 70, 0), (110, 50, 95), (120, 90, 0), (0, 0, 0)])[..3]
        );
        assert_eq!(colors(By::Fate)[3], "k", "a token that was kept has no background");
        // ln 10,000 = 9.21: 7 of it, none, 2 of it, and more.
        let probability = [(129, 53, 0), (0, 0, 0), (36, 15, 0), (170, 70, 0)];
        assert_eq!(colors(By::Probability)[..], painted(probability));
        assert_eq!(colors(By::Entropy)[..], painted([(0, 0, 0), (0, 45, 80), (0, 90, 160), (0, 90, 160)]));
        // Half of 2.5, below 0.
        assert_eq!(colors(By::Advantage)[..], painted([(85, 35, 0); 4]));
        assert_eq!(colors(By::Ratio)[..], painted([(0, 0, 0), (170, 70, 0), (0, 90, 160), (0, 0, 0)]));
        // |w| sqrt(1 - 2p + sum of squares), of 2: nearly 1, 0, and twice sqrt(1 - 0.27).
        let norms = [(64, 24, 54), (0, 0, 0), (111, 42, 93), (64, 24, 54)];
        assert_eq!(colors(By::GradientNorm)[..], painted(norms));
        assert_eq!(
            [0, 1, 2, 3].map(|t| token(&response, t, By::Entropy, false)),
            ["[-s-]", "[~a~]", "[?c?]", "k"]
        );
    }

    #[test]
    fn a_response_has_its_head_its_tokens_and_a_line_for_each_that_is_not_just_kept() {
        let mut response = response();
        let plan = crate::shared::study::tests::run("s/a", &[], Vec::new()).plan;
        let shown = |response: ResponseRecord| {
            let inspected = Inspected {
                run: "a\n".into(),
                plan: plan.clone(),
                step: 2,
                metrics: None,
                responses: vec![response],
            };
            rendered(&inspected, By::Fate, false)
        };
        let expected = "a⏎, step 2: [-silenced-] [?candidate, kept?] [~clipped~]\n\n\
            q␛ #3  no answer  A -1.2500  4 tokens\n  1+1=  [reference 2]\n  [-s-][~a~][?c?]k[=more=]\n    \
            0 “s”  silenced  p 0.0912 %  H 0 nats  ratio 1  gradient norm 0.999  preferred “x” 36.8 %\n    \
            \u{20}  1 “a”  clipped  p 100 %  H 1 nats  ratio 0.5  gradient norm 0\n    \
            \u{20}  2 “c”  candidate, kept  p 13.5 %  H 2 nats  ratio 2  gradient norm 1.71\n";
        let lines = |text: &str| text.lines().map(|line| line.trim().to_string()).collect::<Vec<_>>();
        assert_eq!(lines(&shown(response.clone())), lines(expected));
        // An episode has a border before each answer of its environment, and a line for what follows.
        response.episode =
            serde_json::from_value(json!({"turns": [{"text_sha256": "", "reward": 0.5}]})).unwrap();
        assert!(shown(response).contains("k\n  turn 1: reward 0.5\n  [=more=]\n  \n"));
    }

    #[test]
    fn the_end_of_a_turn_names_its_reward_its_return_and_its_calls() {
        let turn: EpisodeTurn = serde_json::from_value(json!({
            "text_sha256": "", "reward": 0.25, "returns": [1.5, 0.5],
            "calls": [
                {"tool": "add", "arguments": "1\n2", "sha256": ""},
                {"tool": "", "arguments": "?", "sha256": "", "failed": true},
            ],
        }))
        .unwrap();
        let shown = "\n  turn 3: reward 0.25  return 1.5\n  call add(1⏎2)\n  call unreadable(?)  failed\n  ";
        assert_eq!(border(2, &turn), shown);
    }

    #[test]
    fn a_response_cannot_steer_the_terminal() {
        assert_eq!(plain("a\u{1b}[2J\u{9b}\n"), "a␛[2J\u{fffd}⏎");
        assert_eq!(given("\u{1b}", false), "[=␛=]");
        let run = ProgramRun {
            source: "print('\\x1b')".into(),
            end: ProgramEnd::FailedTest,
            failing_test: Some("assert f() == 2: 1".into()),
            printed: "\u{1b}".into(),
            cpu_seconds: 0.25,
        };
        let shown = "  program: failed a test, 0.25 s of processor time\n  failing test: assert f() == 2: 1\n  printed: ␛\n";
        assert_eq!(program(&run), shown);
        assert_eq!(painted("x", (1, 2, 3), true), "\x1b[38;2;255;255;255;48;2;1;2;3;9mx\x1b[0m");
    }
}
