//! `stapo grade --code`: programs against the tests of their lines.

use super::{GradedLine, LineOutcome, bad_line, read_line};
use crate::shared::input::Line;
use anyhow::Result;
use serde_json::{Map, Value};
use stapo_rl::reward::code::{CodeJudge, CodeTests, CodeVerdict};
use stapo_rl::reward::{CodeSpec, CodeStyle};
use stapo_verify::Verdict;
use std::path::PathBuf;

#[derive(clap::Args)]
#[command(next_help_heading = "Programs (--code)")]
pub struct ProgramArgs {
    /// The Python interpreter of programs and tests: a path, or a name on the PATH.
    #[arg(long, default_value = "python3", requires = "code")]
    python: PathBuf,
    /// Where the program is in a response.
    #[arg(long, value_enum, default_value = "block", requires = "code")]
    style: StyleArg,
    /// The most processor time of a program in seconds; wall-clock time may be ten times as long.
    #[arg(long, default_value_t = 3.0, requires = "code")]
    cpu_seconds: f64,
    /// Runs programs without isolation, with limits only, if this machine cannot isolate them.
    #[arg(long, requires = "code")]
    unsafe_code: bool,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum StyleArg {
    /// In the last fenced block.
    Block,
    /// The response continues the "prompt" of the line.
    Complete,
    /// The whole response.
    Whole,
}

impl ProgramArgs {
    pub(super) fn open(&self) -> Result<CodeJudge> {
        let mut spec =
            CodeSpec { python: self.python.clone(), unsafe_code: self.unsafe_code, ..CodeSpec::default() };
        spec.limits.cpu_seconds = self.cpu_seconds;
        spec.style = match self.style {
            StyleArg::Block => CodeStyle::Block,
            StyleArg::Complete => CodeStyle::Complete,
            StyleArg::Whole => CodeStyle::Whole,
        };
        let judge = CodeJudge::open(&spec)?;
        for warning in judge.warnings() {
            eprintln!("warning: {warning}");
        }
        Ok(judge)
    }
}

/// A line that can be judged.
struct Sample {
    response: String,
    reference: String,
    tests: CodeTests,
}

/// The outputs of a batch, whose programs are tested together.
pub(super) fn grade(batch: &[Line], first_line: u64, judge: &CodeJudge) -> Result<Vec<LineOutcome>> {
    let lines: Vec<Result<Sample, LineOutcome>> =
        batch.iter().zip(first_line..).map(|(line, number)| read_sample(line, number)).collect();
    let samples = lines.iter().filter_map(|line| line.as_ref().ok());
    let samples: Vec<(&str, &CodeTests)> =
        samples.map(|sample| (sample.response.as_str(), &sample.tests)).collect();
    let mut verdicts = judge.judge(&samples)?.into_iter();
    let outcome = |line: Result<Sample, LineOutcome>| match line {
        Ok(sample) => {
            let verdict = verdicts.next().expect("one verdict for each sample");
            shown(&sample, &verdict)
        }
        Err(outcome) => outcome,
    };
    Ok(lines.into_iter().map(outcome).collect())
}

fn read_sample(line: &Line, number: u64) -> std::result::Result<Sample, LineOutcome> {
    let row: Map<String, Value> = read_line(line, number)?;
    let text = |key: &str| row.get(key).and_then(Value::as_str).map(str::to_string);
    let response = text("response")
        .ok_or_else(|| bad_line("\"response\" is missing or null, expected a string", number))?;
    let tests = CodeTests::from_row(&row).map_err(|problem| bad_line(&problem, number))?;
    Ok(Sample { response, reference: text("reference").unwrap_or_default(), tests })
}

fn shown(sample: &Sample, judged: &CodeVerdict) -> LineOutcome {
    let verdict = if judged.is_right { Verdict::Right } else { Verdict::Wrong };
    let line = GradedLine {
        verdict,
        extracted: judged.program.as_deref(),
        reference: &sample.reference,
        reason: &judged.reason,
        canonical_answer: None,
        canonical_reference: None,
        micros: (judged.cpu_seconds * 1e6) as u64,
    };
    LineOutcome::Graded(serde_json::to_string(&line).expect("strings and numbers serialise"), verdict)
}
