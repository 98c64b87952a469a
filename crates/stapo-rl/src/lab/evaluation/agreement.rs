//! A second verifier in addition to the rule of a benchmark: where the two agree, and where they do not.

use crate::error::{Error, Result};
use crate::reward::{CommandSpec, Judged, RuleSpec, VerifierSpec, is_program};
use crate::tasks::{Mode, TaskError};
use serde::{Deserialize, Serialize};
use stapo_core::Verdict;
use stapo_core::record::EvalRecord;
use stapo_core::settings::{self, suggest};
use std::path::Path;

/// The key of a record under which the second verifier's judgement stands.
const SECOND: &str = "second";

/// The judgement of the second verifier on a sample.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SecondVerdict {
    pub verdict: Verdict,
    pub answer: Option<String>,
    pub reason: String,
    /// The log-prob of a judge's yes less that of its no.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub margin: Option<f64>,
}

/// Writes the second verifier's judgement into a record.
pub(super) fn note(record: &mut EvalRecord, judged: Judged) {
    let second = SecondVerdict {
        verdict: judged.verdict,
        answer: judged.canonical.or(judged.answer),
        reason: judged.reason,
        margin: judged.judge.and_then(|opinion| opinion.margin),
    };
    let value = serde_json::to_value(second).expect("a verdict is JSON");
    record.extra.insert(SECOND.to_string(), value);
}

/// The second verifier's judgement of a sample; `None` for an evaluation with one verifier.
pub fn second_verdict(record: &EvalRecord) -> Option<SecondVerdict> {
    serde_json::from_value(record.extra.get(SECOND)?.clone()).ok()
}

/// How often the two verifiers of a benchmark agree, by what each calls right.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Agreement {
    pub n_both: usize,
    /// Right by the rule alone, and by the second verifier alone.
    pub n_rule_alone: usize,
    pub n_second_alone: usize,
    pub n_neither: usize,
}

impl Agreement {
    /// Counts the samples that two verifiers judged; `None` if there is none.
    pub fn from_records<'a>(records: impl IntoIterator<Item = &'a EvalRecord>) -> Option<Self> {
        let mut found = Self::default();
        for (record, second) in records.into_iter().filter_map(|own| Some((own, second_verdict(own)?))) {
            let count = match (record.verdict == Verdict::Right, second.verdict == Verdict::Right) {
                (true, true) => &mut found.n_both,
                (true, false) => &mut found.n_rule_alone,
                (false, true) => &mut found.n_second_alone,
                (false, false) => &mut found.n_neither,
            };
            *count += 1;
        }
        (found.n_samples() > 0).then_some(found)
    }

    pub fn n_samples(&self) -> usize {
        self.n_both + self.n_rule_alone + self.n_second_alone + self.n_neither
    }

    pub fn n_apart(&self) -> usize {
        self.n_rule_alone + self.n_second_alone
    }
}

/// Whether the two verifiers of a sample disagree on whether it is right.
pub fn is_disputed(record: &EvalRecord) -> bool {
    second_verdict(record)
        .is_some_and(|second| (second.verdict == Verdict::Right) != (record.verdict == Verdict::Right))
}

/// The table of a verifier under its name.
#[derive(Serialize, Deserialize)]
struct Named {
    verifier: VerifierSpec,
}

impl VerifierSpec {
    /// The verifier that a text on the command line names: the mode of a rule (`math`, `boxed-exact`, ..), the inline table of
    /// a config (`{kind = "python", file = "judge.py"}`), or a program with its arguments.
    pub fn named(text: &str) -> Result<Self> {
        let refuse = |problem: String| Error::Misfit {
            key: "verifier",
            problem,
            remedy: "a mode such as math or boxed-exact, a program with its arguments, or a table as in a config",
        };
        let trimmed = text.trim();
        if trimmed.starts_with('{') {
            let table =
                settings::parse(&format!("verifier = {trimmed}")).map_err(|e| refuse(e.to_string()))?;
            let named: Named = settings::read("", table).map_err(|e| refuse(e.to_string()))?;
            return Ok(named.verifier);
        }
        let mode: std::result::Result<Mode, _> = serde_json::from_value(trimmed.into());
        if let Ok(mode) = mode {
            return Ok(Self::Rule(RuleSpec { mode, ..RuleSpec::default() }));
        }
        let mut words = trimmed.split_whitespace().map(str::to_string);
        let Some(program) = words.next() else { return Err(refuse("is empty".into())) };
        if trimmed == program && !is_program(Path::new(&program)) {
            let modes = Mode::ALL.map(Mode::name);
            let nearest = Some(suggest(trimmed, &modes)).filter(|text| text.starts_with("did you mean"));
            let nearest = nearest.map_or(String::new(), |text| format!("{text} "));
            return Err(TaskError::Verifier {
                program,
                place: "not started".into(),
                problem: "neither a mode nor a program that is here".into(),
                remedy: format!(
                    "{nearest}the modes are {}; a program is a path, or a name on the PATH",
                    modes.join(", ")
                ),
            }
            .into());
        }
        Ok(Self::Command(CommandSpec { args: words.collect(), ..CommandSpec::new(program) }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reward::PythonSpec;
    use serde_json::json;

    #[test]
    fn a_verifier_is_named_by_mode_table_or_program() {
        let named = |text: &str| VerifierSpec::named(text).unwrap();
        assert!(matches!(named("boxed-exact"), VerifierSpec::Rule(rule) if rule.mode == Mode::BoxedExact));
        let VerifierSpec::Command(command) = named("python3 judge.py --strict") else { panic!("a program") };
        assert_eq!((command.program.to_str(), command.args.len()), (Some("python3"), 2));
        let table = named("{kind = \"python\", file = \"judge.py\"}");
        assert!(matches!(table, VerifierSpec::Python(PythonSpec { function, .. }) if function == "reward"));
        for wrong in ["", "{kind = \"oracle\"}", "{"] {
            assert!(VerifierSpec::named(wrong).is_err(), "{wrong}");
        }
        let said = VerifierSpec::named("boxed-exac").unwrap_err().to_string();
        assert!(said.contains("did you mean `boxed-exact`?") && said.contains("multiple-choice"), "{said}");
    }

    #[test]
    fn samples_are_counted_by_who_calls_them_right() {
        let record = |rule: &str, second: Option<&str>| -> EvalRecord {
            let mut value = json!({"schema": 1, "benchmark": "b", "decoding": "d", "problem_id": "p", "sample_idx": 0,
                "text": "", "n_tokens": 0, "finish": {"kind": "length_limit"}, "answer": null, "verdict": rule, "reason": ""});
            if let Some(second) = second {
                value["second"] = json!({"verdict": second, "answer": null, "reason": "so"});
            }
            serde_json::from_value(value).unwrap()
        };
        let records = [
            record("right", Some("right")),
            record("right", Some("wrong")),
            record("no_answer", Some("right")),
            record("wrong", Some("unparsable")),
            record("right", None),
        ];
        let found = Agreement::from_records(&records).unwrap();
        assert_eq!((found.n_both, found.n_rule_alone, found.n_second_alone, found.n_neither), (1, 1, 1, 1));
        assert_eq!((found.n_samples(), found.n_apart()), (4, 2));
        assert_eq!(records.iter().filter(|own| is_disputed(own)).count(), 2);
        assert_eq!(Agreement::from_records(&records[4..]), None);
    }
}
