//! `stapo grade`: responses or answers against references, as JSON lines.

mod code;

use crate::shared::input::{self, Line, next_line};
use crate::shared::terminal::output;
use anyhow::{Context, Result};
use rayon::prelude::*;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use stapo_verify::{
    Fallback, Form, Graded, Mode, Order, Reference, Rounding, Rules, Verdict, grade, grade_answer, reading,
};
use std::io::{BufRead, BufWriter, Write};
use std::process::ExitCode;
use std::time::Instant;

/// Lines and bytes of a batch: they bound the memory whatever the input's length.
const BATCH_LINES: usize = 4096;
const BATCH_BYTES: usize = 16 << 20;
/// Longest line that is read; a longer line is reported as bad.
const MAX_LINE_BYTES: usize = 8 << 20;

/// Grades math answers: reads JSON lines and prints a verdict with its reason for each.
#[derive(clap::Args)]
pub struct Args {
    /// JSON lines {"response" or "answer", "reference", perhaps "problem"}; `-` = standard input.
    input: String,
    /// Runs the program in each response against its tests: lines {"response", "test_list", or "test" and "entry_point", or
    /// "tests"}.
    #[arg(long)]
    code: bool,
    #[command(flatten)]
    programs: code::ProgramArgs,
    /// How answers are compared: math, boxed-exact, dapo, multiple-choice, exact.
    #[arg(long, default_value = "math")]
    mode: Mode,
    /// Which mark of an answer is looked for first in a response.
    #[arg(long, value_enum, default_value = "box-first")]
    order: OrderArg,
    /// What to take from a response that marks no answer.
    #[arg(long, value_enum, default_value = "nothing")]
    fallback: FallbackArg,
    /// How far a printed decimal may be from the value it stands for, in mode math.
    #[arg(long, value_enum, default_value = "six-decimals")]
    rounding: RoundingArg,
    /// In which form a right answer may be written, in mode math.
    #[arg(long, value_enum, default_value = "any")]
    form: FormArg,
    /// Also prints both canonical forms, as `canonical_answer` and `canonical_reference`.
    #[arg(long)]
    canonical: bool,
    /// Prints, instead of records, the verdict and how answer and reference are read, as trees in plain words.
    #[arg(long)]
    explain: bool,
    /// Threads; 0 = one per core.
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u16).range(0..=1024))]
    threads: u16,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum OrderArg {
    BoxFirst,
    LineFirst,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum FallbackArg {
    Nothing,
    LastNumber,
    LastFormula,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum RoundingArg {
    /// Six decimals agree.
    SixDecimals,
    /// A decimal of three significant digits or more equals what rounds to it at its own digits.
    ShownDigits,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum FormArg {
    /// Any form of the right value: 60 + 180 + 126 is 366.
    Any,
    /// Worked out as far as the reference is: 60 + 180 + 126 is wrong if the reference is 366.
    WorkedOut,
}

/// One input line. Other keys are allowed and ignored, so that records of other tools can be graded as they are.
#[derive(Deserialize)]
struct GradeInput {
    response: Option<String>,
    answer: Option<String>,
    reference: Option<String>,
    /// The text of the question: under `--form worked-out` a formula that is copied from it is wrong.
    problem: Option<String>,
}

#[derive(Serialize)]
struct GradedLine<'a> {
    verdict: Verdict,
    extracted: Option<&'a str>,
    reference: &'a str,
    reason: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    canonical_answer: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    canonical_reference: Option<&'a str>,
    micros: u64,
}

#[derive(Serialize)]
struct BadLine<'a> {
    error: &'a str,
    line: u64,
}

/// Lines and verdicts so far, for the summary at the end.
#[derive(Default)]
struct VerdictCounts {
    lines: u64,
    malformed: u64,
    /// In the order of the verdicts' declaration.
    by_verdict: [u64; 5],
}

const VERDICTS: [(Verdict, &str); 5] = [
    (Verdict::Right, "right"),
    (Verdict::Wrong, "wrong"),
    (Verdict::NoAnswer, "no answer"),
    (Verdict::Unparsable, "unparsable"),
    (Verdict::OverBudget, "over budget"),
];

pub fn run(args: &Args) -> Result<ExitCode> {
    let mut input = input::open(&args.input)?;
    let name = input::name(&args.input);
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(args.threads.into())
        .build()
        .context("starting threads")?;
    let judge = args.code.then(|| args.programs.open()).transpose()?;
    let mut out = BufWriter::with_capacity(1 << 16, output());
    let start = Instant::now();
    let mut counts = VerdictCounts::default();
    loop {
        let batch =
            read_batch(&mut *input).with_context(|| format!("input {name}, after line {}", counts.lines))?;
        if batch.is_empty() {
            break;
        }
        let first_line = counts.lines + 1;
        let graded: Vec<LineOutcome> = match &judge {
            Some(judge) => code::grade(&batch, first_line, judge)?,
            None => pool.install(|| {
                let lines = batch.par_iter().enumerate();
                lines.map(|(i, line)| grade_line(line, first_line + i as u64, args)).collect()
            }),
        };
        for line in graded {
            counts.count(&line);
            if let LineOutcome::Graded(text, _) | LineOutcome::Malformed(text) = line {
                out.write_all(text.as_bytes())
                    .and_then(|()| out.write_all(b"\n"))
                    .context("standard output")?;
            }
        }
        out.flush().context("standard output")?;
    }
    counts.print(start.elapsed().as_secs_f64());
    Ok(if counts.malformed == 0 { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

/// Reads the next batch of lines; empty at the end of the input.
fn read_batch(input: &mut dyn BufRead) -> std::io::Result<Vec<Line>> {
    let mut batch = Vec::new();
    let mut n_bytes = 0;
    while batch.len() < BATCH_LINES && n_bytes < BATCH_BYTES {
        let Some(line) = next_line(input, MAX_LINE_BYTES)? else { break };
        if let Line::Text(bytes) = &line {
            n_bytes += bytes.len();
        }
        batch.push(line);
    }
    Ok(batch)
}

/// The output for one line of input.
enum LineOutcome {
    Graded(String, Verdict),
    Malformed(String),
    Blank,
}

/// The record of a line; the error is the output of a line that holds none.
fn read_line<T: DeserializeOwned>(line: &Line, number: u64) -> std::result::Result<T, LineOutcome> {
    match line {
        Line::Text(bytes) if bytes.iter().all(u8::is_ascii_whitespace) => Err(LineOutcome::Blank),
        Line::Text(bytes) => serde_json::from_slice(bytes)
            .map_err(|error| bad_line(&format!("not a JSON record: {error}"), number)),
        Line::TooLong => Err(bad_line(&input::too_long(MAX_LINE_BYTES), number)),
    }
}

fn grade_line(line: &Line, number: u64, args: &Args) -> LineOutcome {
    let record: GradeInput = match read_line(line, number) {
        Ok(record) => record,
        Err(outcome) => return outcome,
    };
    let Some(reference) = record.reference else {
        return bad_line("\"reference\" is missing or null, expected a string", number);
    };
    let wanted = Reference { answer: &reference, problem: record.problem.as_deref() };
    let start = Instant::now();
    let graded = match (&record.response, &record.answer) {
        (Some(_), Some(_)) => {
            return bad_line("both \"response\" and \"answer\" are there, expected one", number);
        }
        (None, None) => {
            return bad_line("\"response\" or \"answer\" is missing, expected one string", number);
        }
        (Some(response), None) => grade(response, wanted, rules(args)),
        (None, Some(answer)) => grade_answer(answer, wanted, rules(args)),
    };
    let micros = start.elapsed().as_micros() as u64;
    let text = if args.explain {
        explained(&graded, &reference, number)
    } else {
        shown(&graded, &reference, args.canonical, micros)
    };
    LineOutcome::Graded(text, graded.verdict)
}

fn rules(args: &Args) -> Rules {
    let order = match args.order {
        OrderArg::BoxFirst => Order::BoxFirst,
        OrderArg::LineFirst => Order::LineFirst,
    };
    let fallback = match args.fallback {
        FallbackArg::Nothing => Fallback::Nothing,
        FallbackArg::LastNumber => Fallback::LastNumber,
        FallbackArg::LastFormula => Fallback::LastFormula,
    };
    let rounding = match args.rounding {
        RoundingArg::SixDecimals => Rounding::SixDecimals,
        RoundingArg::ShownDigits => Rounding::ShownDigits,
    };
    let form = match args.form {
        FormArg::Any => Form::Any,
        FormArg::WorkedOut => Form::WorkedOut,
    };
    Rules { mode: args.mode, order, fallback, rounding, form }
}

fn shown(graded: &Graded, reference: &str, with_canonical: bool, micros: u64) -> String {
    let line = GradedLine {
        verdict: graded.verdict,
        extracted: graded.extracted.as_deref(),
        reference,
        reason: &graded.reason,
        canonical_answer: graded.answer.as_deref().filter(|_| with_canonical),
        canonical_reference: with_canonical.then_some(graded.reference.as_str()),
        micros,
    };
    serde_json::to_string(&line).expect("strings and numbers serialise")
}

/// The verdict and both readings of one line, for people.
fn explained(graded: &Graded, reference: &str, number: u64) -> String {
    let verdict = VERDICTS.iter().find(|(listed, _)| *listed == graded.verdict).map_or("", |(_, name)| name);
    let tree = |text: &str| format!("    {}\n", reading(text).replace('\n', "\n    "));
    let answer = match &graded.extracted {
        Some(answer) => format!("  the answer {answer} is read as\n{}", tree(answer)),
        None => "  there is no answer\n".into(),
    };
    format!(
        "line {number}: {verdict}: {}\n{answer}  the reference {reference} is read as\n{}",
        graded.reason,
        tree(reference)
    )
}

fn bad_line(error: &str, line: u64) -> LineOutcome {
    LineOutcome::Malformed(
        serde_json::to_string(&BadLine { error, line }).expect("strings and numbers serialise"),
    )
}

impl VerdictCounts {
    fn count(&mut self, line: &LineOutcome) {
        self.lines += 1;
        match line {
            LineOutcome::Blank => {}
            LineOutcome::Malformed(_) => self.malformed += 1,
            LineOutcome::Graded(_, verdict) => {
                for (n, (listed, _)) in self.by_verdict.iter_mut().zip(VERDICTS) {
                    *n += u64::from(listed == *verdict);
                }
            }
        }
    }

    fn print(&self, seconds: f64) {
        let n_graded: u64 = self.by_verdict.iter().sum();
        let parts: Vec<String> =
            VERDICTS.iter().zip(self.by_verdict).map(|((_, name), n)| format!("{n} {name}")).collect();
        let share = 100.0 * self.by_verdict[0] as f64 / n_graded.max(1) as f64;
        eprintln!(
            "{n_graded} graded in {seconds:.2} s: {}; {share:.1} % right; {} malformed lines",
            parts.join(", "),
            self.malformed
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Given {
        #[command(flatten)]
        args: Args,
    }

    fn given(words: &[&str]) -> Args {
        Given::parse_from([&["grade", "-"], words].concat()).args
    }

    #[test]
    fn every_flag_is_a_rule_of_the_grader() {
        let plain = rules(&given(&[]));
        let expected = Rules {
            mode: Mode::Math,
            order: Order::BoxFirst,
            fallback: Fallback::Nothing,
            rounding: Rounding::SixDecimals,
            form: Form::Any,
        };
        assert_eq!(plain, expected);
        for (words, expected) in [
            (["--mode", "exact"], Rules { mode: Mode::Exact, ..plain }),
            (["--order", "line-first"], Rules { order: Order::LineFirst, ..plain }),
            (["--fallback", "last-number"], Rules { fallback: Fallback::LastNumber, ..plain }),
            (["--fallback", "last-formula"], Rules { fallback: Fallback::LastFormula, ..plain }),
            (["--rounding", "shown-digits"], Rules { rounding: Rounding::ShownDigits, ..plain }),
            (["--form", "worked-out"], Rules { form: Form::WorkedOut, ..plain }),
        ] {
            assert_eq!(rules(&given(&words)), expected, "{words:?}");
        }
    }

    #[test]
    fn the_program_of_a_question_is_part_of_its_form() {
        let line = |text: &str| Line::Text(text.as_bytes().to_vec());
        let graded = |text: &str| match grade_line(&line(text), 3, &given(&["--form", "worked-out"])) {
            LineOutcome::Graded(_, verdict) => Ok(verdict),
            LineOutcome::Malformed(text) => Err(text),
            LineOutcome::Blank => Err(String::new()),
        };
        // A formula that is copied from the question is not worked out.
        assert_eq!(graded(r#"{"answer": "x^2-1", "reference": "(x-1)(x+1)"}"#), Ok(Verdict::Right));
        let copied = r#"{"answer": "x^2-1", "reference": "(x-1)(x+1)", "problem": "Factor $x^2-1$."}"#;
        assert_eq!(graded(copied), Ok(Verdict::Wrong));
        assert_eq!(graded("  "), Err(String::new()));
    }

    #[test]
    fn a_batch_ends_with_its_lines_or_its_bytes() {
        let lengths = |text: Vec<u8>| {
            let mut input = std::io::Cursor::new(text);
            let mut lengths = Vec::new();
            loop {
                match read_batch(&mut input).unwrap().len() {
                    0 => return lengths,
                    n => lengths.push(n),
                }
            }
        };
        assert_eq!(lengths(vec![b'\n'; BATCH_LINES + 1]), [BATCH_LINES, 1]);
        let long = [vec![b'x'; MAX_LINE_BYTES], b"\n".to_vec()].concat().repeat(3);
        assert_eq!(lengths(long), [2, 1], "two lines of 8 MiB fill a batch");
    }
}
