//! Sets of questions by name, file or task.

use crate::error::{Error, Result};
use crate::reward::code::{Asking, TestKind};
use crate::reward::{AskJudge, CodeSpec, JudgeSpec, Judged, Programs, VerifierSpec};
use crate::rollout::ModelJudge;
use crate::run::hash_file;
use crate::tasks::{EnvironmentSpec, RowsSpec, Task, TaskSpec, bare_name, first_row, is_data_file};
use stapo_core::Problem;
use stapo_core::record::FileHash;
use std::collections::{BTreeMap, HashSet};
use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The six benchmarks of the STAPO paper, in the paper's order.
pub const SIX: [&str; 6] = ["aime24", "aime25", "amc23", "math500", "minerva", "olympiad"];

/// The benchmarks with a name.
pub const KNOWN: [Known; 10] = [
    Known { name: "aime24", n_samples: 32, n_questions: 30, repository: "math-ai/aime24" },
    Known { name: "aime25", n_samples: 32, n_questions: 30, repository: "math-ai/aime25" },
    Known { name: "amc23", n_samples: 32, n_questions: 40, repository: "math-ai/amc23" },
    Known { name: "math500", n_samples: 4, n_questions: 500, repository: "math-ai/math500" },
    Known { name: "minerva", n_samples: 4, n_questions: 272, repository: "math-ai/minervamath" },
    Known { name: "olympiad", n_samples: 4, n_questions: 674, repository: "math-ai/olympiadbench" },
    Known { name: "gsm8k", n_samples: 4, n_questions: 1319, repository: "openai/gsm8k" },
    Known { name: "math", n_samples: 4, n_questions: 5000, repository: "DigitalLearningGmbH/MATH-lighteval" },
    Known { name: "humaneval", n_samples: 4, n_questions: 164, repository: "openai/openai_humaneval" },
    Known { name: "mbpp", n_samples: 4, n_questions: 500, repository: "google-research-datasets/mbpp" },
];

#[derive(Debug, Clone, Copy)]
pub struct Known {
    pub name: &'static str,
    /// The k of avg@k in the paper.
    pub n_samples: usize,
    pub n_questions: usize,
    /// The data set on the Hugging Face hub from which `stapo fetch` gets the questions.
    pub repository: &'static str,
}

/// Samples per question of a benchmark that is not in the paper.
pub const OTHER_SAMPLES: usize = 4;

/// How the questions of a benchmark are asked, where it is not the benchmark's usual way.
#[derive(Debug, Clone, Copy, Default)]
pub struct QuestionStyle<'a> {
    /// Replaces the benchmark's template.
    pub template: Option<&'a str>,
    /// The system message of conversations without one.
    pub system: Option<&'a str>,
    /// Whether prompts are rendered with the model's chat template. A benchmark of programs then asks for a fenced block,
    /// and else begins a program that the model continues.
    pub chat: bool,
}

/// Questions, and the task that judges the answers.
pub struct Benchmark {
    pub name: String,
    pub problems: Vec<Problem>,
    pub n_samples: usize,
    /// The file of the questions; `None` for generated questions.
    pub input: Option<FileHash>,
    /// How programs are asked for; `None` for a benchmark whose answers are not programs.
    asking: Option<Asking>,
    spec: TaskSpec,
    task: Task,
    /// Whether a model judges too.
    has_judge: bool,
}

impl Benchmark {
    /// `name` is one of [`KNOWN`], whose file is in the folder `data`; or `arithmetic` or `countdown`, for the held-out
    /// problems of these tasks; or a file of rows. A file whose rows hold tests is a benchmark of programs.
    pub fn open(name: &str, data: &Path, style: QuestionStyle) -> Result<Self> {
        let (spec, asking) = spec(name, data, style)?;
        let task = Task::open(&spec)?;
        let n_samples = KNOWN.iter().find(|known| known.name == name).map(|known| known.n_samples);
        let name = bare_name(name);
        let files = spec.rows().map(|rows| rows.path.files()).transpose()?.unwrap_or_default();
        if files.len() > 1 {
            return Err(Error::Benchmark {
                name,
                problem: format!("a pattern of {} files", files.len()),
                remedy: "name each file, so that each is a benchmark".into(),
            });
        }
        let input =
            files.first().map(|file| hash_file(&format!("benchmark {name}"), &file.path)).transpose()?;
        Ok(Self {
            name,
            input,
            problems: task.held_out(usize::MAX),
            n_samples: n_samples.unwrap_or(OTHER_SAMPLES),
            asking,
            spec,
            task,
            has_judge: false,
        })
    }

    /// The number of questions. No judge is opened, so nothing need be installed.
    pub fn n_questions(name: &str, data: &Path) -> Result<usize> {
        let (spec, _) = spec(name, data, QuestionStyle::default())?;
        Ok(Task::open_with(&spec, Programs::Never)?.held_out(usize::MAX).len())
    }

    /// Opens several benchmarks. A name that is there twice is refused.
    pub fn open_all(names: &[String], data: &Path, style: QuestionStyle) -> Result<Vec<Self>> {
        let open = |name: &String| Self::open(name, data, style);
        let benchmarks: Vec<Self> = names.iter().map(open).collect::<Result<_>>()?;
        let mut seen = HashSet::new();
        if let Some(twice) = benchmarks.iter().find(|benchmark| !seen.insert(&benchmark.name)) {
            return Err(Error::Benchmark {
                name: twice.name.clone(),
                problem: "named twice".into(),
                remedy: "their samples would be taken for one another's".into(),
            });
        }
        Ok(benchmarks)
    }

    /// Keeps the first `n_questions`, and takes `n_samples` of each, where these are given.
    pub fn limit(&mut self, n_questions: Option<usize>, n_samples: Option<usize>) -> Result<()> {
        self.problems.truncate(n_questions.unwrap_or(usize::MAX));
        self.n_samples = n_samples.unwrap_or(self.n_samples);
        if !self.problems.is_empty() && self.n_samples > 0 {
            return Ok(());
        }
        Err(Error::Benchmark {
            name: self.name.clone(),
            problem: "nothing to ask".into(),
            remedy: "the limit of questions and the number of samples are at least 1".into(),
        })
    }

    /// Judges every response by a second verifier too, and lets an environment answer the policy's turns, where these are
    /// given. `programs` says whether their programs may start.
    pub fn equip(
        &mut self,
        verifier: Option<&VerifierSpec>,
        environment: Option<&EnvironmentSpec>,
        programs: Programs,
    ) -> Result<()> {
        if verifier.is_some() || environment.is_some() {
            self.task = Task::with_environment(&self.spec, verifier, environment, programs)?;
        }
        Ok(())
    }

    /// Gives the second verifier its model, where it is a judge. Benchmarks may share one.
    pub fn set_judge(&mut self, judge: &Arc<ModelJudge>) {
        let load = |_: &JudgeSpec| Ok::<_, Infallible>(Box::new(Arc::clone(judge)) as Box<dyn AskJudge>);
        let Ok(()) = self.task.load_judges(load);
        self.has_judge = true;
    }

    pub(super) fn task(&self) -> &Task {
        &self.task
    }

    /// Whether an environment answers the policy's turns.
    pub(super) fn has_episodes(&self) -> bool {
        self.task.has_episodes()
    }

    /// The judgements of the benchmark's rule, and those of a second verifier where there is one.
    pub(super) fn judge(&self, samples: &[(&Problem, &str)]) -> Result<Vec<(Judged, Option<Judged>)>> {
        let cut = |text| self.asking.map_or(text, |asking| asking.cut(text));
        let samples: Vec<_> = samples.iter().map(|&(problem, text)| (problem, cut(text))).collect();
        let mut all = self.task.judge_all(&samples)?.into_iter();
        let by_rule = all.next().unwrap_or_default();
        let mut second = all.next().unwrap_or_default().into_iter();
        Ok(by_rule.into_iter().map(|judged| (judged, second.next())).collect())
    }

    /// How many samples are judged at once: programs run side by side, a judge reads a batch, and rules take no time worth
    /// sharing.
    pub(super) fn n_judged_together(&self) -> usize {
        if self.asking.is_some() || self.has_judge { 64 } else { 1 }
    }

    /// Texts that end a response, besides those of the evaluation.
    pub(super) fn stops(&self) -> &'static [&'static str] {
        self.asking.map_or(&[], |asking| asking.stops)
    }

    /// What the user should know about how programs are kept apart.
    pub fn warnings(&self) -> Vec<String> {
        let has_programs = self.asking.is_some() || self.has_episodes();
        if has_programs { self.task.warnings() } else { Vec::new() }
    }
}

/// The task of a benchmark, and how programs are asked for where its answers are programs.
fn spec(name: &str, data: &Path, style: QuestionStyle) -> Result<(TaskSpec, Option<Asking>)> {
    let is_known = KNOWN.iter().any(|known| known.name == name);
    let path = match name {
        "arithmetic" | "countdown" => return Ok((generated(name, style.template, style.system), None)),
        _ if is_known => find(name, data)?,
        _ if is_data_file(name) => name.into(),
        _ => {
            let names: Vec<&str> = KNOWN.iter().map(|known| known.name).collect();
            return Err(Error::Benchmark {
                name: name.to_string(),
                problem: "unknown".into(),
                remedy: format!(
                    "one of all, {}, arithmetic, countdown, or a file: .jsonl, .json, .csv, .tsv (also .gz, .zst) or .parquet",
                    names.join(", ")
                ),
            });
        }
    };
    let (rows, asking) = rows(name, path, style)?;
    Ok((TaskSpec::of_file(rows), asking))
}

/// The rows of a file, and how programs are asked for where the first row holds tests.
fn rows(name: &str, path: PathBuf, style: QuestionStyle) -> Result<(RowsSpec, Option<Asking>)> {
    let QuestionStyle { template, system, chat } = style;
    let mut rows = RowsSpec {
        held_out_share: 1.0,
        template: template.map(str::to_owned),
        system: system.map(str::to_owned),
        ..RowsSpec::new(path)
    };
    let first = first_row(&rows.path)?.unwrap_or_default();
    let Some(kind) = TestKind::of_row(&first) else { return Ok((rows, None)) };
    // A template of the user's asks for a block in its own words.
    let chosen = if chat || template.is_some() { kind.instruction() } else { kind.beginning() };
    rows.template.get_or_insert_with(|| chosen.template.to_string());
    rows.verifier = VerifierSpec::Code(CodeSpec { style: chosen.style, ..CodeSpec::default() });
    if name == "mbpp" && first.contains_key("split") {
        rows.only = BTreeMap::from([("split".into(), vec!["test".into()])]);
    }
    Ok((rows, Some(chosen)))
}

fn generated(name: &str, template: Option<&str>, system: Option<&str>) -> TaskSpec {
    let (template, system) = (template.map(str::to_owned), system.map(str::to_owned));
    if name == "countdown" {
        TaskSpec::Countdown(crate::tasks::CountdownSpec { template, system, ..Default::default() })
    } else {
        TaskSpec::Arithmetic(crate::tasks::ArithmeticSpec { template, system, ..Default::default() })
    }
}

/// The path `DATA/NAME.jsonl` or `DATA/NAME.parquet`, or the same in `DATA/benchmarks`.
fn find(name: &str, data: &Path) -> Result<PathBuf> {
    let folders = [data.to_owned(), data.join("benchmarks")];
    let paths = folders
        .iter()
        .flat_map(|folder| ["jsonl", "parquet"].map(|extension| folder.join(format!("{name}.{extension}"))));
    paths.into_iter().find(|path| path.is_file()).ok_or_else(|| Error::Benchmark {
        name: name.to_string(),
        problem: format!("no {name}.jsonl or {name}.parquet in {} or its folder benchmarks", data.display()),
        remedy: format!(
            "`stapo fetch benchmarks {name} --out {}` gets it; --data and evaluation.benchmark_data name another folder",
            data.display()
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reward::CodeStyle;

    fn spec(name: &str, lines: &str, style: QuestionStyle) -> (RowsSpec, Option<Asking>) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(format!("{name}.jsonl"));
        std::fs::write(&path, lines).unwrap();
        rows(name, path, style).unwrap()
    }

    #[test]
    fn a_file_with_tests_is_a_benchmark_of_programs() {
        let mbpp = r#"{"id": 1, "prompt": "Add.", "test_list": ["assert f()"], "split": "prompt"}"#;
        let chat = QuestionStyle { chat: true, ..QuestionStyle::default() };
        let (rows, asking) = spec("mbpp", mbpp, chat);
        assert_eq!(rows.only["split"], ["test"], "the test rows alone");
        assert!(rows.template().contains("fenced block") && asking.unwrap().stops.is_empty());
        assert!(matches!(rows.verifier, VerifierSpec::Code(code) if code.style == CodeStyle::Block));
        let (rows, asking) = spec("mine", mbpp, QuestionStyle::default());
        assert!(rows.only.is_empty(), "all rows of another file");
        assert!(rows.template().starts_with("\"\"\"\n") && asking.unwrap().stops.contains(&"\nassert"));
        assert!(matches!(rows.verifier, VerifierSpec::Code(code) if code.style == CodeStyle::Whole));
        let given = QuestionStyle { template: Some("{{ prompt }}"), ..QuestionStyle::default() };
        let (rows, _) = spec("mine", mbpp, given);
        assert_eq!(rows.template(), "{{ prompt }}");
        let (rows, asking) = spec("math", r#"{"problem": "1+1", "answer": "2"}"#, chat);
        assert!(matches!(rows.verifier, VerifierSpec::Rule(_)) && asking.is_none());
    }

    #[test]
    fn a_benchmark_without_questions_or_samples_is_refused() {
        let open = || Benchmark::open("arithmetic", Path::new("."), QuestionStyle::default()).unwrap();
        let mut two = open();
        two.limit(Some(2), Some(1)).unwrap();
        assert_eq!((two.problems.len(), two.n_samples), (2, 1));
        assert!(open().limit(None, Some(0)).is_err() && open().limit(Some(0), None).is_err());
    }
}
